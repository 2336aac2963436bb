"""Verdicts in LlamaIndex's instrumentation: an event for each, its log and its trace, and a callback that judges."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

from llama_index_semgrad_guard.records import completed
from llama_index_semgrad_guard.turn import current_turn
from semgrad_guard import Policy, Verdict
from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import observes, require_policy, settle, unscored

if TYPE_CHECKING:  # it needs the extra `tracing`
    from opentelemetry._logs import LoggerProvider

CallbackMode = Literal["raise", "observe"]
Source = Literal["llm", "query_engine", "chat_engine", "agent", "callback"]
_log = logging.getLogger("semgrad_guard")
_dispatcher = get_dispatcher(__name__)


class UncertaintyEvent(BaseEvent):
    """A verdict, as soon as there is one; `source` is the kind of guard that decided ("llm": scored, and undecided)."""

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
        advice = "" if record["enforced"] else " (not enforced)"
        message = f"{event.source}: {record['action']}{advice}; {numbers}; {record['reason'] or record['status']}"
        _log.log(level, message, extra={"semgrad_guard": record})


class UncertaintyTracer(BaseEventHandler):
    """Writes every verdict into the span of the guard that decided (engine, chat engine, agent's step), or of the LLM.

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


def report(verdict: Verdict, source: Source, *, keep_draft: bool = False) -> None:
    """Send a verdict to LlamaIndex's event handlers."""
    _dispatcher.event(UncertaintyEvent(source=source, record=verdict.metadata(keep_draft=keep_draft)))


class UncertaintyRouterCallback(BaseCallbackHandler):
    """Judges every answer of the LLMs it is attached to.

        Settings.callback_manager = CallbackManager([UncertaintyRouterCallback(Policy(threshold=0.004))])

    or `SemGradLLM(callback_manager=...)` for an LLM that is called directly: LlamaIndex's query engines put the global
    manager in place of their LLM's own.

    A callback can neither replace an answer nor escalate it: `GuardedQueryEngine` and `GuardedChatEngine` do. It judges
    each call of the model by itself, those that condense questions or choose tools too, so attach it to an LLM that
    only answers. A stream has been delivered when it is judged. Within a guarded engine it does nothing.

    Args:
        policy: which scores to let through. Answers of other LLMs are unscored: `on_unscored` decides.
        mode: "raise" (a `LowConfidenceError` from the LLM's method, for a stream after its last piece) or "observe"
            (an `UncertaintyEvent` for the event handlers).

    Raises:
        InputError: a mode that a callback cannot carry out.
        LowConfidenceError, BindingMismatchError: at an answer; see above.
    """

    def __init__(self, policy: Policy, *, mode: CallbackMode = "raise") -> None:
        super().__init__(event_starts_to_ignore=[], event_ends_to_ignore=[])
        if mode not in get_args(CallbackMode):
            raise InputError(
                f"a LlamaIndex callback can 'raise' or 'observe', not {mode!r}; "
                "put a GuardedQueryEngine or a GuardedChatEngine around the engine instead"
            )
        self._policy = require_policy(policy)
        self._mode: CallbackMode = mode

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **kwargs: Any
    ) -> None:
        """Judge an answer; failed calls have none."""
        payload = payload or {}
        response = payload.get(EventPayload.RESPONSE) or payload.get(EventPayload.COMPLETION)
        if event_type != CBEventType.LLM or response is None or current_turn() is not None:
            return
        answer = completed(response)
        draft = answer if isinstance(answer, Verdict) else unscored(answer, reason="the answer carries no score")
        verdict = settle(draft, self._policy, "raise", can_escalate=False).verdict
        if observes(self._mode):
            report(verdict.model_copy(update={"enforced": False}), "callback")
        elif verdict.action != "answer":
            report(verdict, "callback")
            raise LowConfidenceError(verdict, draft=None)

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: Any,
    ) -> str:
        """Do nothing: there is no answer yet."""
        return event_id

    def start_trace(self, trace_id: str | None = None) -> None:
        """Do nothing."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Do nothing."""
