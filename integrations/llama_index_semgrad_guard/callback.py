"""`UncertaintyRouterCallback`: the policy on LlamaIndex's callback manager, where it can report or raise."""

from __future__ import annotations

from typing import Any

from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload

from llama_index_semgrad_guard.calls import current_turn
from llama_index_semgrad_guard.events import report
from llama_index_semgrad_guard.records import completed
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import Mode, require_policy, settle, unscored


class UncertaintyRouterCallback(BaseCallbackHandler):
    """Judges every answer of the LLMs it is attached to.

        Settings.callback_manager = CallbackManager([UncertaintyRouterCallback(Policy(threshold=0.004))])

    or `SemGradLLM(callback_manager=...)` for an LLM that is called directly: LlamaIndex's query engines put the global
    manager in place of their LLM's own.

    A callback can neither replace an answer nor hand it on: `GuardedQueryEngine` and `GuardedChatEngine` do. It judges
    each call of the model by itself, those that condense questions or choose tools too, so attach it to an LLM that
    only answers. A stream has been delivered when it is judged. Within a guarded engine it stands back.

    Args:
        policy: what to let through. Answers of other LLMs are unscored: `on_unscored` decides.
        mode: "raise" (a `LowConfidenceError` from the LLM's method, for a stream after its last piece) or "observe"
            (an `UncertaintyEvent` for the event handlers).

    Raises:
        InputError: a mode that a callback cannot carry out.
        LowConfidenceError, BindingMismatchError: at an answer; see above.
    """

    def __init__(self, policy: Policy, *, mode: Mode = "raise") -> None:
        super().__init__(event_starts_to_ignore=[], event_ends_to_ignore=[])
        if mode not in ("raise", "observe"):
            raise InputError(
                f"a LlamaIndex callback can 'raise' or 'observe', not {mode!r}; "
                "put a GuardedQueryEngine or a GuardedChatEngine around the engine instead"
            )
        self._policy, self._mode = require_policy(policy), mode

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **kwargs: Any
    ) -> None:
        """Judge an answer; failed calls have none."""
        payload = payload or {}
        response = payload.get(EventPayload.RESPONSE) or payload.get(EventPayload.COMPLETION)
        if event_type != CBEventType.LLM or response is None or current_turn() is not None:
            return
        verdict = self._judged(completed(response))
        if self._mode == "observe":
            report(verdict.model_copy(update={"enforced": False}), "callback")
        elif verdict.action != "answer":
            report(verdict, "callback")
            raise LowConfidenceError(verdict, draft=None)

    def _judged(self, answer: str | Verdict) -> Verdict:
        draft = answer if isinstance(answer, Verdict) else unscored(answer, reason="the answer carries no score")
        return settle(draft, self._policy, "enforce", can_escalate=False).verdict

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: Any,
    ) -> str:
        """Nothing to do: there is no answer yet."""
        return event_id

    def start_trace(self, trace_id: str | None = None) -> None:
        """Traces are others' business."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Traces are others' business."""
