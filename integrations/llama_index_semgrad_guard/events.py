"""Verdicts in LlamaIndex's instrumentation: an event for each, and a handler that logs them."""

from __future__ import annotations

import logging
from typing import Any, Literal

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from semgrad_guard import Verdict

Source = Literal["llm", "query_engine", "chat_engine", "agent", "callback"]
_log = logging.getLogger("semgrad_guard")
_dispatcher = get_dispatcher(__name__)


class UncertaintyEvent(BaseEvent):
    """A verdict, as soon as there is one; `source` says who decided ("llm": scored, and decided by nobody)."""

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

    It only reports: LlamaIndex swallows whatever an event handler raises. The record is the log record's attribute
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
        numbers = ", ".join(f"{name} {_shown(record[name])}" for name in ("uncertainty", "threshold", "confidence"))
        advice = "" if record["enforced"] else " (not enforced)"
        message = f"{event.source}: {record['action']}{advice}; {numbers}; {record['reason'] or record['status']}"
        _log.log(level, message, extra={"semgrad_guard": record})


def report(verdict: Verdict, source: Source, *, keep_draft: bool = False) -> None:
    """Send a verdict to LlamaIndex's event handlers."""
    _dispatcher.event(UncertaintyEvent(source=source, record=verdict.metadata(keep_draft=keep_draft)))


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
