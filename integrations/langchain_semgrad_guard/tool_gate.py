"""`ToolGate`: a tool call runs only where its uncertainty keeps the promise; else the agent reads why, and continues.

A call is judged as it will run. What a middleware before this one has changed was written by nobody, so it has no
score and does not run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ToolCallRequest
from langchain_core.decisions import BaseDecisionModel, ClassifierRequest, Question
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.types import Command
from pydantic import TypeAdapter

from langchain_semgrad_guard.decisions import require_rule, settings_of, uncertainty_of
from langchain_semgrad_guard.messages import get_verdict
from semgrad_guard import METADATA_KEY, Calibration, ToolCall, Verdict
from semgrad_guard.adapters.call_gate import CallGate, calibrate_calls
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Steps, Work, adrive, drive

Result = ToolMessage | Command[Any]
Score = Callable[[ToolCallRequest], float | None]

_QUESTION: TypeAdapter[Any] = TypeAdapter(Question)
_BLOCKED = "blocked"
"""The mark of a message in the place of a blocked call's result."""
_RECENT = 30
"""Messages that a decision model is shown, as `AutoModeMiddleware` does."""


class ToolGate(CallGate, AgentMiddleware[Any, Any, Any]):
    """Runs a tool call where its uncertainty keeps the promise of a calibration.

        agent = create_agent(chat, tools, middleware=[..., ToolGate(rule)])

    By default a call's uncertainty is that of the tokens in which it was written: of a `ChatSemGrad`, or of a
    `GuardedChatModel` whose server reports log-probabilities. Of several calls in a message each is judged by itself.
    A blocked one is answered by a `ToolMessage` with the status "error", which tells no score.

    After a block every call of the same tool stays blocked, until the user writes again or a later call of another
    tool has a result: a model that may write a call anew until it passes breaks any promise.

    Put it last in the list, so that it judges what runs.

    Args:
        rule: a calibration of calls (`calibrate_tool_calls`), or a rule of `calibrate_decisions`.
        score: for a rule of decisions the decision model, which is shown the messages, the call and the tool's
            description as `AutoModeMiddleware` shows them; or a function of the request that returns the call's
            uncertainty, None where it has none.
        **options: `trusted` (tools whose calls always run, by name), `words` (what the model reads in the place of a
            result; `{tool}` is the tool's name) and `log` (a `DecisionLog`, which gets a row for each call that is
            judged, and watches the rule's promise).

    Raises:
        InputError: the rule needs a decision model, or none.
        BindingMismatchError: the rule was made for another model; in a run, for another version or estimator.
    """

    def __init__(self, rule: Calibration, score: BaseDecisionModel | Score | None = None, **options: Any) -> None:
        super().__init__(rule, scored_elsewhere=score is not None, **options)
        self.score = score
        if isinstance(score, BaseDecisionModel):
            require_rule(rule, score)
        elif score is not None and not callable(score):
            raise InputError("score is a decision model, or a function of the request")

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]) -> Result:
        """Run the call, or say why not."""
        return handler(request) if drive(self._lets_through(request)) else self._blocked(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Result]]
    ) -> Result:
        """Like `wrap_tool_call`, on the event loop."""
        return await handler(request) if await adrive(self._lets_through(request)) else self._blocked(request)

    def _lets_through(self, request: ToolCallRequest) -> Steps[bool]:
        call = ToolCall(request.tool_call["name"], request.tool_call["args"], request.tool_call["id"])
        if call.name in self.trusted:
            return True
        if _stays_blocked(call.name, messages_of(request)):
            return False
        if isinstance(self.score, BaseDecisionModel):
            model, question = self.score, self._question(request)
            response = yield Work(lambda: model.invoke(question), lambda: model.ainvoke(question))
            require_rule(self.rule, model, version=response.model)
            uncertainty = uncertainty_of(response.answers.get(call.name), settings_of(self.rule)["safe"])
        else:
            uncertainty = self.score(request) if self.score else self._written(call, messages_of(request))
        return (yield from self.judged(call, uncertainty))

    def _question(self, request: ToolCallRequest) -> ClassifierRequest:
        """The rule's question about a call, as `AutoModeMiddleware` asks it."""
        call = request.tool_call
        state: dict[str, Any] = {
            "messages": messages_of(request)[-_RECENT:],
            "tool_call": {"id": call["id"], "name": call["name"], "args": call["args"]},
        }
        if request.tool is not None and request.tool.description:
            state["tool_description"] = request.tool.description
        return {
            "state": state,
            "questions": {call["name"]: _QUESTION.validate_json(settings_of(self.rule)["question"])},
        }

    def _written(self, call: ToolCall, messages: Sequence[BaseMessage]) -> float | None:
        """The uncertainty of the tokens that spell a call; None where it was changed since, or was never scored."""
        for message in reversed(messages):
            if isinstance(message, AIMessage) and any(own["id"] == call.id for own in message.tool_calls):
                return self.score_of(get_verdict(message), call)
        return None

    def _blocked(self, request: ToolCallRequest) -> ToolMessage:
        call = request.tool_call
        return ToolMessage(
            self.words_for(call["name"]),
            tool_call_id=call["id"],
            name=call["name"],
            status="error",
            additional_kwargs={METADATA_KEY: _BLOCKED},
        )


def calibrate_tool_calls(
    runs: Iterable[tuple[Sequence[BaseMessage], Mapping[str, bool]]],
    *,
    alpha: float,
    delta: float,
    trusted: Collection[str] = (),
    tries: int = 0,
) -> Calibration:
    """The rule of a `ToolGate` from recorded runs of an agent, their calls labelled by people.

    "Take a run of which some call is let through, and one of these at random: it is wrong with probability at most
    alpha." Runs are the independent units: calls of one run depend on each other.

        rule = calibrate_tool_calls([(agent.invoke(task)["messages"], labels), ...], alpha=0.1, delta=0.1)

    Record the runs without a gate, in a sandbox: a blocked call has no label.

    Args:
        runs: each run's messages, and whether each of its calls was right, by the call's id.
        alpha: the largest error rate among the calls that are let through, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        trusted: tools whose calls the gate will not judge, by name; they need no label.
        tries: numbers the calibrations on these labels, this one included; 0: this is the only one.

    Raises:
        InputError: a call has no label, or no run has a call.
        CalibrationError: the calls were scored in different ways.
    """
    labelled = ((_calls(messages), labels) for messages, labels in runs)
    return calibrate_calls(labelled, trusted=trusted, alpha=alpha, delta=delta, tries=tries)


def _calls(messages: Sequence[BaseMessage]) -> Iterator[tuple[Verdict | None, ToolCall]]:
    for message in messages:
        for call in message.tool_calls if isinstance(message, AIMessage) else ():
            yield get_verdict(message), ToolCall(call["name"], call["args"], call["id"])


def messages_of(request: ToolCallRequest) -> Sequence[BaseMessage]:
    """The messages of the agent that makes a call."""
    return request.state["messages"]


def _stays_blocked(name: str, messages: Sequence[BaseMessage]) -> bool:
    """Whether a tool's last call was blocked, and nothing has been learned since.

    New is a message of the user's, or a result of a call that was made after the block; a summary, which LangChain
    marks by `lc_source`, is not.
    """
    blocked, later = False, set[str | None]()
    for message in messages:
        if isinstance(message, ToolMessage) and message.additional_kwargs.get(METADATA_KEY) == _BLOCKED:
            if message.name == name:
                blocked, later = True, set[str | None]()
        elif isinstance(message, AIMessage):
            later |= {call["id"] for call in message.tool_calls}
        elif isinstance(message, ToolMessage):
            blocked = blocked and not (message.tool_call_id in later and message.status == "success")
        elif isinstance(message, HumanMessage) and "lc_source" not in message.additional_kwargs:
            blocked = False
    return blocked
