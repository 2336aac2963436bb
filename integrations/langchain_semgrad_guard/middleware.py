"""`UncertaintyMiddleware`: a guard between an agent and its chat model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentMiddleware, AgentState, PrivateStateAttr, hook_config
from langchain.agents.structured_output import StructuredOutputValidationError
from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable
from langgraph.runtime import Runtime
from langgraph.types import interrupt

from langchain_semgrad_guard.agent_exit import Judged, also, judged_late
from langchain_semgrad_guard.agent_turn import Request, Response, Result, Settings, Turn
from langchain_semgrad_guard.callback import rules_of
from langchain_semgrad_guard.review import REVIEW_KEY, HumanReview, question_of, settled
from semgrad_guard import METADATA_KEY, Calibration, DriftMonitor, Estimator, LanguageModel, Policy, estimator_of
from semgrad_guard.errors import InputError
from semgrad_guard.guard import AbstainMessage, DecisionSink, KeepDraft, Mode, OnError, Terms, Timeout, as_estimator


class UncertaintyState(AgentState[Any]):
    """An agent's state; the message that waits for a person, and the messages that are judged (plain JSON)."""

    semgrad_guard_review: NotRequired[Annotated[dict[str, Any] | None, PrivateStateAttr]]
    semgrad_guard_judged: NotRequired[Annotated[list[Judged], PrivateStateAttr, also]]


class UncertaintyMiddleware(AgentMiddleware[UncertaintyState, Any, Any]):
    """Judges every message of an agent's model, texts and tool calls alike, before the agent acts on it.

        create_agent(ChatSemGrad(), tools, middleware=[UncertaintyMiddleware(Policy(threshold=0.004))])

    A message at or below the threshold is delivered. Any other is replaced before it leaves the model node: its tool
    calls do not run, and no stream shows it. Every decision also goes out as a custom event, "semgrad_guard".

    Put it first in the list. Every message that the middleware after it returns (another model's, a fallback's, a
    cached one, one of its own) is then judged before the node ends. A message that comes past it (from a middleware
    before it in the list, from a `Command`, from a hook that changes a judged message) is judged after the node: its
    tools do not run and the state holds the delivered message, but a stream of the node may have shown the other.

    Args:
        policy: which messages to let through. A calibrated policy is checked against each message's own record.
        mode: "enforce"; "annotate": deliver every message, live, with the decision in its metadata; "observe": deliver
            every message as it is, the decision being a custom event only; "raise": a `LowConfidenceError`.
        escalate_to: answers in place of a message that is not let through. A chat model gets the agent's tools and
            response format, any other Runnable the messages. `HumanReview()` interrupts the graph, which needs a
            checkpointer; the model is not called again.
        abstain_message: delivered in place of a message that is neither let through nor escalated. It calls no tool,
            so the agent stops there.
        trusted_tools: tools that may run whatever the score (searching, reading): a message that calls no others does
            so, with the decision as advice; the text next to its calls is delivered by its score only. A name without a
            tool trusts nothing.
        keep_draft: keep the text of withheld messages in the metadata (`draft`).
        scorer: the local copy of the weights that the agent's model serves, where its answers carry no score; its
            `estimator` and `prompt_template` are those of `GuardedChatModel`.

    `on_error`, `timeout`, `monitor` and `log` are those of `UncertaintyRouterCallback`.

    Raises:
        InputError: no policy, an unknown mode, a target that is none, or tools given as one string; at the first
            message, `HumanReview()` in an agent without a checkpointer.
    """

    state_schema = UncertaintyState

    def __init__(  # noqa: PLR0913 - every setting of a guard
        self,
        policy: Policy,
        *,
        mode: Mode = Terms.mode,
        escalate_to: Runnable[Any, Any] | HumanReview | None = None,
        abstain_message: AbstainMessage = Terms.abstain_message,
        trusted_tools: Collection[str] = (),
        keep_draft: KeepDraft = Terms.keep_draft,
        on_error: OnError = Terms.on_error,
        timeout: Timeout = None,
        monitor: DriftMonitor | None = None,
        log: DecisionSink | None = None,
        scorer: LanguageModel | None = None,
        estimator: Estimator | Calibration | Policy | None = None,
        prompt_template: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(trusted_tools, str):
            raise InputError(f"trusted_tools is a list of names: [{trusted_tools!r}]")
        person = escalate_to if isinstance(escalate_to, HumanReview) else None
        rules = rules_of(
            self,
            policy,
            None if isinstance(escalate_to, HumanReview) else escalate_to,
            mode=mode,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            on_error=on_error,
            timeout=timeout,
            monitor=monitor,
            log=log,
        )
        if scorer is not None and estimator is None and policy.calibration is not None:
            estimator = estimator_of(policy.calibration)
        self.settings = Settings(
            rules=replace(rules, trusted_tools=frozenset(trusted_tools)),
            person=person,
            scorer=scorer,
            estimator=None if estimator is None else as_estimator(estimator),
            prompt_template=prompt_template,
        )

    def wrap_model_call(self, request: Request, handler: Callable[[Request], Response]) -> Result:
        """Call the model through a guard and judge its messages, or deliver a person's decision."""
        turn = Turn(self.settings, request)
        try:
            with turn.apart():
                response = handler(turn.request)
            response = turn.judged(response)
        except StructuredOutputValidationError as error:
            response = turn.waiting(error)
        finally:
            for decision in turn.decisions:
                dispatch_custom_event(METADATA_KEY, decision)
        return turn.result(response)

    async def awrap_model_call(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Result:
        """Like `wrap_model_call`, without blocking the event loop."""
        turn = Turn(self.settings, request)
        try:
            with turn.apart():
                response = await handler(turn.request)
            response = await turn.ajudged(response)
        except StructuredOutputValidationError as error:
            response = turn.waiting(error)
        finally:
            for decision in turn.decisions:
                await adispatch_custom_event(METADATA_KEY, decision)
        return turn.result(response)

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: UncertaintyState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Interrupt for the person, if a message waits. The model's run is over by now: resuming repeats nothing.

        An answer of another shape, or one that is not allowed, gets the same question with an "error". Where nothing
        waits, messages that came past the guard are judged.
        """
        review, person, rules = state.get(REVIEW_KEY), self.settings.person, self.settings.rules
        if review is None or "settled" in review:
            return judged_late(state, rules)
        if person is None:
            raise InputError("this thread waits for a person: resume it with escalate_to=HumanReview()")
        question = question_of(review, person)
        answer = interrupt(question)
        while True:
            try:
                return settled(review, person, answer, state["messages"], rules)
            except InputError as error:
                answer = interrupt({**question, "error": str(error)})

    @hook_config(can_jump_to=["model"])
    async def aafter_model(self, state: UncertaintyState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Like `after_model`."""
        return self.after_model(state, runtime)

    # A hook before these may jump to the end, past them; the agent's own come then, too.
    after_agent, aafter_agent = after_model, aafter_model
