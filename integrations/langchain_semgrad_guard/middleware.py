"""`UncertaintyMiddleware`: a guard between an agent and its chat model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentMiddleware, AgentState, PrivateStateAttr, hook_config
from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable
from langgraph.runtime import Runtime
from langgraph.types import interrupt

from langchain_semgrad_guard.agent_review import REVIEW_KEY, question_of, settled
from langchain_semgrad_guard.agent_turn import Request, Response, Result, Terms, Turn
from langchain_semgrad_guard.audience import unheard
from langchain_semgrad_guard.judging import judged_by
from langchain_semgrad_guard.review import HumanReview
from semgrad_guard import METADATA_KEY, Policy
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ABSTAIN_MESSAGE
from semgrad_guard.guard.modes import Mode, require_mode
from semgrad_guard.guard.policy import require_policy


class UncertaintyState(AgentState[Any]):
    """An agent's state, and the message that a person is asked about (plain JSON, for checkpointers)."""

    semgrad_guard_review: NotRequired[Annotated[dict[str, Any] | None, PrivateStateAttr]]


class UncertaintyMiddleware(AgentMiddleware[UncertaintyState, Any, Any]):
    """Judges every message of an agent's model, texts and tool calls alike, before the agent acts on it.

        create_agent(ChatSemGrad(), tools, middleware=[UncertaintyMiddleware(Policy(threshold=0.004))])

    A message at or below the threshold is delivered. Any other is replaced before it leaves the model node: its tool
    calls do not run, and no stream shows it. Every decision also goes out as a custom event, "semgrad_guard".

    Args:
        policy: what to let through. A calibrated policy is checked against each message's own record.
        mode: "enforce"; "annotate": deliver every message, live, with the decision in its metadata; "observe": deliver
            every message as it is, the decision being a custom event only; "raise": a `LowConfidenceError`.
        escalate_to: asked for what is not let through. A chat model gets the agent's tools and response format, any
            other Runnable the messages. `HumanReview()` interrupts the graph, which needs a checkpointer; the model is
            not asked again.
        abstain_message: delivered in place of a message that is neither let through nor escalated. It calls no tool,
            so the agent stops there.
        trusted_tools: tools that may run whatever the score (searching, reading): a message that calls no others is
            delivered, with the decision as advice. A name that no tool has trusts nothing.
        keep_draft: keep the text of withheld messages in the metadata (`draft`).

    Raises:
        InputError: no policy, an unknown mode, a target that is none, or tools given as one string.
    """

    state_schema = UncertaintyState

    def __init__(
        self,
        policy: Policy,
        *,
        mode: Mode = "enforce",
        escalate_to: Runnable[Any, Any] | HumanReview | None = None,
        abstain_message: str = ABSTAIN_MESSAGE,
        trusted_tools: Collection[str] = (),
        keep_draft: bool = False,
    ) -> None:
        super().__init__()
        _check(escalate_to, trusted_tools)
        self.terms = Terms(
            policy=require_policy(policy),
            mode=require_mode(mode),
            escalate_to=escalate_to,
            abstain_message=abstain_message,
            trusted_tools=frozenset(trusted_tools),
            keep_draft=keep_draft,
        )

    def wrap_model_call(self, request: Request, handler: Callable[[Request], Response]) -> Result:
        """Ask the model and carry out what the policy says; or say what a person has decided."""
        turn = Turn(self.terms, request)
        if (reviewed := turn.reviewed_request) is not None:
            return turn.closed(handler(reviewed))
        with turn.drafting():
            response = handler(turn.draft_request)
        dispatch_custom_event(METADATA_KEY, turn.judge(response))
        if (target := turn.target) is None:
            turn.deliver()
        else:
            with unheard(), judged_by(None):
                asked = turn.target_request
                turn.deliver(handler(asked) if asked else target.invoke(turn.target_messages))
        if (announcement := turn.announcement) is not None:
            announcement.make()
        return turn.result

    async def awrap_model_call(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Result:
        """Like `wrap_model_call`, without blocking the event loop."""
        turn = Turn(self.terms, request)
        if (reviewed := turn.reviewed_request) is not None:
            return turn.closed(await handler(reviewed))
        with turn.drafting():
            response = await handler(turn.draft_request)
        await adispatch_custom_event(METADATA_KEY, turn.judge(response))
        if (target := turn.target) is None:
            turn.deliver()
        else:
            with unheard(), judged_by(None):
                asked = turn.target_request
                turn.deliver(await (handler(asked) if asked else target.ainvoke(turn.target_messages)))
        if (announcement := turn.announcement) is not None:
            await announcement.amake()
        return turn.result

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: UncertaintyState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Ask the person, if a message waits for one. Here the model's run is over, so that resuming repeats nothing.

        An answer of another shape, or one that is not allowed, is answered by the same question with an "error".
        """
        review, person, terms = state.get(REVIEW_KEY), self.terms.escalate_to, self.terms
        if review is None or "settled" in review:
            return None
        if not isinstance(person, HumanReview):
            raise InputError("this thread waits for a person: resume it with escalate_to=HumanReview()")
        words: dict[str, Any] = {"abstain_message": terms.abstain_message, "keep_draft": terms.keep_draft}
        question = question_of(review, person)
        answer = interrupt(question)
        while True:
            try:
                return settled(review, person, answer, state["messages"], **words)
            except InputError as error:
                answer = interrupt({**question, "error": str(error)})

    @hook_config(can_jump_to=["model"])
    async def aafter_model(self, state: UncertaintyState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Like `after_model`."""
        return self.after_model(state, runtime)


def _check(escalate_to: Any, trusted_tools: Any) -> None:
    if escalate_to is not None and not isinstance(escalate_to, (Runnable, HumanReview)):
        raise InputError(
            f"escalate_to must be a Runnable or HumanReview(), not a {type(escalate_to).__name__}; "
            "wrap a function in RunnableLambda"
        )
    if isinstance(trusted_tools, str):
        raise InputError(f"trusted_tools is a list of names: [{trusted_tools!r}]")
