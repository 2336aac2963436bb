"""Verdicts in LlamaIndex's instrumentation: an event for each, its log and its trace."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

from semgrad_guard import Verdict
from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.guard import Terms

if TYPE_CHECKING:  # it needs the extra `tracing`
    from opentelemetry._logs import LoggerProvider

Source = Literal["llm", "query_engine", "chat_engine"]
_log = logging.getLogger("semgrad_guard")
_dispatcher = get_dispatcher(__name__)


class UncertaintyEvent(BaseEvent):
    """A verdict, as soon as there is one; `source` is the part that decided (an LLM without a router: scored)."""

    source: Source
    record: dict[str, Any]
    """The verdict's `metadata()`: no text, and a withheld draft only where `keep_draft` is set."""

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this event."""
        return "UncertaintyEvent"


class UncertaintyEventHandler(BaseEventHandler):
    """Logs every verdict to the logger "semgrad_guard": let through as information, anything else as a warning.

        get_dispatcher().add_event_handler(UncertaintyEventHandler())

    It only reports: LlamaIndex swallows the errors of event handlers. The record is the log record's attribute
    `semgrad_guard`, for formatters that write JSON.
    """

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this handler."""
        return "UncertaintyEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Log the event if it is a verdict."""
        if not isinstance(event, UncertaintyEvent):
            return
        record = event.record
        level = logging.INFO if record["action"] == "answer" else logging.WARNING
        names = ("uncertainty", "threshold", "confidence")
        numbers = ", ".join(f"{name} {'none' if record[name] is None else f'{record[name]:.4g}'}" for name in names)
        advice = "" if record["details"]["enforced"] else " (not enforced)"
        message = f"{event.source}: {record['action']}{advice}; {numbers}; {record['reason'] or record['status']}"
        _log.log(level, message, extra={"semgrad_guard": record})


class UncertaintyTracer(BaseEventHandler):
    """Writes every verdict into the span of the engine or the LLM that decided.

        get_dispatcher().add_event_handler(UncertaintyTracer())

    The span is the current one: OpenInference's, if its LlamaIndex instrumentor (4.6.1 or later) is on, or the one
    around the call. Its attributes are the verdict's fields (`semgrad_guard.uncertainty`, `semgrad_guard.action`, ...);
    a log event `gen_ai.evaluation.result` is tied to it. No text is written. Needs the extra `tracing`.

    Args:
        logger_provider: where events go; default: OpenTelemetry's global one.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    _evaluations: EvaluationLog = PrivateAttr()

    def __init__(self, *, logger_provider: LoggerProvider | None = None) -> None:
        super().__init__()
        self._evaluations = EvaluationLog("llama_index_semgrad_guard", logger_provider=logger_provider)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this handler."""
        return "UncertaintyTracer"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Write the event if it is a verdict."""
        if isinstance(event, UncertaintyEvent):
            self._evaluations.write(event.record)


def reporting(terms: Terms, source: Source) -> Terms:
    """The terms, each decision by which is an event as well."""

    def notify(verdict: Verdict) -> None:
        report(verdict, source, keep_draft=terms.keep_draft)
        if terms.notify is not None:
            terms.notify(verdict)

    return replace(terms, notify=notify)


def report(verdict: Verdict, source: Source, *, keep_draft: bool = False) -> None:
    """Send a verdict to LlamaIndex's event handlers."""
    _dispatcher.event(UncertaintyEvent(source=source, record=verdict.metadata(keep_draft=keep_draft)))
