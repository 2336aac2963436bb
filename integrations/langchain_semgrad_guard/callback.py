"""`UncertaintyRouterCallback`: decides, when a chat model's run ends, what becomes of its answer."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable

from langchain_semgrad_guard.docket import is_escalating, open_for
from langchain_semgrad_guard.judging import judgement
from langchain_semgrad_guard.observing import report
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import ABSTAIN_MESSAGE
from semgrad_guard.guard.modes import Mode, require_mode, withholds
from semgrad_guard.guard.policy import require_policy

_REMEDY = (
    "Use ChatSemGrad(...) and one of invoke, ainvoke, batch, abatch, generate, stream, astream or their event streams, "
    "and attach the router to that model rather than to a chain that holds other models: "
    'chat.with_config(callbacks=[router]), ChatSemGrad(callbacks=[router]), or config={"callbacks": [router]}. '
    'A router with mode="observe" goes with any model.'
)


class UncertaintyRouterCallback(BaseCallbackHandler):
    """Applies a policy to every answer of the chat model it is attached to; the model enforces what it decides.

    An answer at or below the threshold is delivered. What becomes of any other is the `mode`'s affair:

    - `enforce`: before anything of it leaves the model it is replaced by the answer of `escalate_to`, or by
      `abstain_message` where there is no target. A stream is buffered: it arrives in one chunk.
    - `raise`: the model raises `LowConfidenceError`, which holds the verdict, before anything leaves it. The run ends
      with that error; no target is asked.
    - `annotate`: the answer is delivered, live where it is streamed, and the decision stands in its metadata (a
      stream's last chunk) with `enforced: false`. No target is asked.
    - `observe`: the answer and its metadata stay as they are. The decision goes to the logger `semgrad_guard` and,
      inside a chain or a graph, out as a custom event `semgrad_guard`.

    A callback cannot replace an answer on its own (LangChain's end hooks come too late for streams and are swallowed on
    some paths). It therefore refuses, at the start of a run, models that would ignore it; an observer refuses none.

    Args:
        policy: what to let through. A calibrated policy is checked against each answer's own record.
        escalate_to: any Runnable that takes the messages and returns a message or a string: a larger chat model, a
            retrieval chain, a `ChatSemGrad` with a router of its own. A scored target's verdict is kept inside this
            one's; any other target is passed on as unscored, outside every promise.
        mode: what to do with a decision.
        abstain_message: delivered in place of an answer that is neither let through nor escalated.
        keep_draft: keep the text of withheld answers in the metadata (`draft`).

    Raises:
        InputError: no policy, a target that is no Runnable, or an unknown mode.
    """

    run_inline = True
    raise_error = True

    def __init__(
        self,
        policy: Policy,
        escalate_to: Runnable[Any, Any] | None = None,
        *,
        mode: Mode = "enforce",
        abstain_message: str = ABSTAIN_MESSAGE,
        keep_draft: bool = False,
    ) -> None:
        if escalate_to is not None and not isinstance(escalate_to, Runnable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"escalate_to must be a Runnable, not a {type(escalate_to).__name__}; wrap a function in RunnableLambda"
            )
        self.policy, self.escalate_to = require_policy(policy), escalate_to
        self.mode: Mode = require_mode(mode)
        self.abstain_message, self.keep_draft = abstain_message, keep_draft

    @property
    def withholds(self) -> bool:
        """Whether an answer may be kept back, so that nothing of it may leave the model before it is judged."""
        return withholds(self.mode)

    def on_chat_model_start(self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        """Refuse a chat model, or a path through it, that would deliver whatever this router decides."""
        self._require_enforcement(serialized)

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **kwargs: Any) -> None:
        """Refuse text-in, text-out models."""
        self._require_enforcement(serialized)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the decision about a run. Errors are recorded too: raised here they would leave the run open."""
        if self.mode == "observe":
            report(lambda: self.judge(response))
            return
        docket = open_for(self)
        if docket is None:
            return
        try:
            docket.verdicts[run_id] = self.judge(response)
        except Exception as error:  # noqa: BLE001 - the model raises it on the caller's path, whatever it is
            docket.errors[run_id] = error

    def judge(self, response: LLMResult) -> Verdict:
        """The decision about one run's answer.

        Raises:
            BindingMismatchError: the policy was calibrated for something else.
        """
        # Inside its own escalation a router still judges, but hands on no further: a target may hold the same model.
        can_escalate = self.escalate_to is not None and not is_escalating(self)
        generation = response.generations[0][0]
        message = generation.message if isinstance(generation, ChatGeneration) else AIMessage(generation.text)
        verdict = judgement(message, self.policy, can_escalate=can_escalate)
        return verdict.model_copy(update={"enforced": self.withholds})

    def _require_enforcement(self, serialized: dict[str, Any] | None) -> None:
        if self.mode != "observe" and open_for(self) is None:
            name = ((serialized or {}).get("id") or ["this model"])[-1]
            raise UnenforcedPolicyError(f"{name} would ignore this router's decisions on this path. {_REMEDY}")


def require_confidence(verdict: Verdict) -> None:
    """Raise `LowConfidenceError`, with the answer as the verdict's draft, unless the answer is let through."""
    if verdict.action != "answer":
        raise LowConfidenceError(verdict, draft=verdict.text)
