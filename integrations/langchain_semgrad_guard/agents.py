"""Middleware of agents: a guard around the model of each call, and a gate for single calls of tools.

`UncertaintyMiddleware` is for an agent whose model comes from elsewhere. `ToolGate` runs a tool call only where its
uncertainty keeps the promise; else the agent reads why, and continues. Calls are judged once, right after the model
wrote them, and the agent's own state keeps which of them may run and which tools are closed. So no rewritten, removed
or added message changes a decision; and what would run has to be the call that was judged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NotRequired, cast

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, ToolCallRequest
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.decisions import BaseDecisionModel, ClassifierRequest, Question
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.config import get_config
from langgraph.runtime import Runtime
from langgraph.types import Command
from pydantic import TypeAdapter

from langchain_semgrad_guard.deciding import Deciding
from langchain_semgrad_guard.decisions import require_rule, settings_of, uncertainty_of
from langchain_semgrad_guard.messages import get_verdict, stage_verdict
from langchain_semgrad_guard.router import UncertaintyRouterCallback
from langchain_semgrad_guard.served import GuardedChatModel
from semgrad_guard import METADATA_KEY, Calibration, ToolCall, Verdict
from semgrad_guard.adapters.calls import TURN, CallGate, calibrate_calls, scores_of
from semgrad_guard.adapters.model_fields import require_known
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import Steps, Work, adrive, drive

Request = ModelRequest[Any]
Response = ModelResponse[Any]


class UncertaintyMiddleware(AgentMiddleware[Any, Any, Any]):
    """Puts a guard around the model of each call, whichever middleware before it has chosen that model.

        create_agent("openai:gpt-5", tools, middleware=[..., UncertaintyMiddleware(router)])

    A message that is not let through calls no tool, so that the agent ends its turn with the abstain message. Put it
    last in the list: an answer from a model that a middleware behind it puts in is an `UnenforcedPolicyError`. An agent
    whose model is a `ChatSemGrad` or a `GuardedChatModel` with a router needs no middleware.

    Args:
        router: the rules.
        **options: others of `GuardedChatModel` (`scorer`, `estimator`, `by`, `on_doubt`, `carry`, `timeout`).

    Raises:
        InputError: it is no router, or an option is not known.
    """

    def __init__(self, router: UncertaintyRouterCallback, **options: Any) -> None:
        super().__init__()
        self.router, self._options = UncertaintyRouterCallback.require(router), options
        require_known("UncertaintyMiddleware", options, GuardedChatModel.model_fields)

    def wrap_model_call(self, request: Request, handler: Callable[[Request], Response]) -> Response:
        """Call the guarded model."""
        return self._checked(handler(request.override(model=self._guarded(request.model))))

    async def awrap_model_call(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        """Like `wrap_model_call`, on the event loop."""
        return self._checked(await handler(request.override(model=self._guarded(request.model))))

    def _guarded(self, model: Any) -> Any:
        if not isinstance(model, Deciding):
            return GuardedChatModel(model, self.router, **self._options)
        if model.router in (None, self.router):
            return model.model_copy(update={"router": self.router})
        raise UnenforcedPolicyError("the agent's model has another router than its UncertaintyMiddleware: give one")

    def _checked(self, response: Response) -> Response:
        """The response, if a model with this policy delivered its messages."""
        own = self.router.policy.recorded_threshold, self.router.policy.calibration_id
        for verdict in (stage_verdict(message) for message in response.result if isinstance(message, AIMessage)):
            if verdict is None or (verdict.threshold, verdict.details.calibration_id) != own:
                raise UnenforcedPolicyError("a middleware behind this one has put in another model: put this one last")
        return response


# Single calls of tools.

Result = ToolMessage | Command[Any]
Score = Callable[[ToolCallRequest], float | None]

_QUESTION: TypeAdapter[Any] = TypeAdapter(Question)
_BLOCKED = "blocked"
"""The mark of a message in the place of a blocked call's result."""
_RECENT = 30
"""Messages that a decision model is shown, as `AutoModeMiddleware` does."""


class GatedState(AgentState[Any]):
    """An agent's state with that of its gates, by their names.

    Of each: `may_run` (the digests of the last message's calls that may run, by id), `closed` (tools of which a call
    was blocked), and `known` (ids of the messages in a person's name that were there before).
    """

    semgrad_guard_gates: NotRequired[Annotated[dict[str, Any], PrivateStateAttr]]


_GATES = "semgrad_guard_gates"


class ToolGate(CallGate, AgentMiddleware[Any, Any, Any]):
    """Runs a tool call where its uncertainty keeps the promise of a calibration.

        agent = create_agent(chat, tools, middleware=[..., ToolGate(rule)])

    By default a call's uncertainty is that of the tokens in which it was written: of a `ChatSemGrad`, or of a
    `GuardedChatModel` whose server reports log-probabilities. Of several calls in a message each is judged by itself.
    A blocked one is answered by a `ToolMessage` with the status "error", which tells no score.

    After a block every later call of the same tool stays blocked, until the agent is called with a new message of a
    person's: a model that may write a call anew until it passes breaks any promise.

    Put it last in the list, so that it judges what the model wrote, and sees what runs. A call whose arguments, name or
    tool were changed in between does not run.

    An agent that another agent calls as a tool, or that is a node of a graph, gets its messages from these: run the
    whole in `with gate.turn():`, which is then the time of one message of a person's.

    Args:
        rule: a calibration of calls (`calibrate_tool_calls`), or a rule of `calibrate_decisions`.
        score: for a rule of decisions the decision model, which is shown the messages and the call as
            `AutoModeMiddleware` shows them; or a function of the request (without its `tool`) that returns the call's
            uncertainty, None where it has none.
        **options: `trusted` (tools whose calls always run, by name), `words` (what the model reads in the place of a
            result; `{tool}` is the tool's name) and `log` (a `DecisionLog`, which gets a row for each call that is
            judged, and watches the rule's promise).

    Raises:
        InputError: the rule needs a decision model, or none; or an option is of another kind.
        BindingMismatchError: the rule was made for another model; in a run, for another version or estimator.
    """

    state_schema = GatedState

    def __init__(self, rule: Calibration, score: BaseDecisionModel | Score | None = None, **options: Any) -> None:
        super().__init__(rule, scored_elsewhere=score is not None, **options)
        self.score = score
        if isinstance(score, BaseDecisionModel):
            require_rule(rule, score)
        elif score is not None and not callable(score):
            raise InputError("score is a decision model, or a function of the request")

    @property
    def name(self) -> str:
        """The middleware's name: an agent may have gates of several rules, and each of them has to let a call run."""
        return f"{type(self).__name__}[{self.rule.id}]"

    def before_agent(self, state: Any, runtime: Runtime[Any]) -> dict[str, Any]:
        """Open the tools again where a person has written since.

        Raises:
            UnenforcedPolicyError: the agent runs within a graph, and outside of a turn.
        """
        if get_config().get("metadata", {}).get("checkpoint_ns") and TURN.get() is None:  # that of the graph around it
            raise UnenforcedPolicyError(
                "this agent runs within another one or a graph, whose messages may be a model's: run the whole in "
                "`with gate.turn():`, once for each message of a person's"
            )
        own = self._own(state)
        return self._update(state, closed=_closed(state["messages"], own), known=_by_people(state["messages"], own))

    def after_model(self, state: Any, runtime: Runtime[Any]) -> dict[str, Any]:
        """Judge the calls of the message that the model wrote."""
        return drive(self._judge(state, runtime))

    async def aafter_model(self, state: Any, runtime: Runtime[Any]) -> dict[str, Any]:
        """Like `after_model`, on the event loop."""
        return await adrive(self._judge(state, runtime))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]) -> Result:
        """Run the call, or say why not."""
        return handler(request) if self._may_run(request) else self._blocked(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Result]]
    ) -> Result:
        """Like `wrap_tool_call`, on the event loop."""
        return await handler(request) if self._may_run(request) else self._blocked(request)

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the state keeps for this gate."""
        return state.get(_GATES, {}).get(self.name, {})

    def _update(self, state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        return {_GATES: {**state.get(_GATES, {}), self.name: {**self._own(state), **changes}}}

    def _judge(self, state: Mapping[str, Any], runtime: Runtime[Any]) -> Steps[dict[str, Any]]:
        own, messages, turn = self._own(state), state["messages"], TURN.get()
        closed = set[str](own.get("closed", ()))
        before = closed.union(turn.closed if turn else ())
        may_run = dict[str, str]()
        verdict, calls = _last_calls(messages)
        for call, (uncertainty, bound) in zip(calls, scores_of(verdict, calls), strict=True):
            if call.name in self.trusted or call.name in before:
                continue
            if self.score is not None:
                uncertainty, bound = (yield from self._scored_by(self.score, call, state, runtime)), None
            if (yield from self.judged(call, uncertainty, bound)):
                may_run[call.id or ""] = call.digest
            else:
                closed.add(call.name)
                if turn is not None:
                    turn.close(call.name, None)
        return self._update(state, may_run=may_run, closed=sorted(closed), known=_by_people(messages, own))

    def _scored_by(
        self, score: BaseDecisionModel | Score, call: ToolCall, state: Mapping[str, Any], runtime: Runtime[Any]
    ) -> Steps[float | None]:
        written: Any = {"name": call.name, "args": dict(call.arguments), "id": call.id}
        if not isinstance(score, BaseDecisionModel):
            return score(ToolCallRequest(written | {"type": "tool_call"}, None, state, cast("Any", runtime)))
        question = ClassifierRequest(
            state={"messages": state["messages"][-_RECENT:], "tool_call": written},
            questions={call.name: _QUESTION.validate_json(settings_of(self.rule)["question"])},
        )
        response = yield Work(lambda: score.invoke(question), lambda: score.ainvoke(question))
        require_rule(self.rule, score, version=response.model)
        return uncertainty_of(response.answers.get(call.name), settings_of(self.rule)["safe"])

    def _may_run(self, request: ToolCallRequest) -> bool:
        """Whether what would run is a call that was let through, by the tool that it names.

        Raises:
            UnenforcedPolicyError: no gate has judged the model's messages here.
        """
        state: Any = cast("Any", request).state
        own = self._own(state) if hasattr(state, "get") else {}
        if not own:
            raise UnenforcedPolicyError(
                "ToolGate has judged no message of this model: it is a middleware of create_agent, and no part of "
                "another graph"
            )
        call = ToolCall(request.tool_call["name"], request.tool_call["args"], request.tool_call["id"])
        return _by_its_own_tool(request) and (
            call.name in self.trusted or own.get("may_run", {}).get(call.id) == call.digest
        )

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
        InputError: a call has no label, or shares its id with another one of its run; no run has a call; or there is
            something else than such runs.
        CalibrationError: the calls were scored in different ways.
    """
    how: Any = {"alpha": alpha, "delta": delta, "tries": tries}
    return calibrate_calls(runs, _calls, form="LangChain's messages", trusted=trusted, **how)


def _calls(messages: Iterable[Any]) -> Iterator[tuple[Verdict | None, Sequence[ToolCall]]]:
    for message in messages:
        if not isinstance(message, BaseMessage):
            raise InputError(f'a run is the list agent.invoke(...)["messages"], and not of {message!r:.60}')
        if isinstance(message, AIMessage):
            yield get_verdict(message), _calls_of(message)


def _calls_of(message: AIMessage) -> list[ToolCall]:
    return [ToolCall(call["name"], call["args"], call["id"]) for call in message.tool_calls]


def _last_calls(messages: Sequence[BaseMessage]) -> tuple[Verdict | None, list[ToolCall]]:
    """The calls of the last message of a model, and its verdict. One that has an answer already will not run.

    Raises:
        InputError: several calls have one id, or one has none.
    """
    answered = set[str]()
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        if isinstance(message, AIMessage):
            calls = [call for call in _calls_of(message) if call.id not in answered]
            if len({call.id for call in calls} - {None, ""}) < len(calls):
                raise InputError("each tool call needs an id of its own, by which it is judged and answered")
            return get_verdict(message) if calls else None, calls
    return None, []


def _by_its_own_tool(request: ToolCallRequest) -> bool:
    """Whether the tool that would run is the agent's own of the call's name; one that it does not know has the name."""
    tool, name = request.tool, request.tool_call["name"]
    if tool is None:  # nothing runs
        return True
    runtime: Any = cast("Any", request).runtime
    known = [one for one in runtime.tools if one.name == name] or [tool]
    return tool.name == name and any(tool is one for one in known)


def _people(messages: Sequence[BaseMessage]) -> list[HumanMessage]:
    """Messages in a person's name; a summary, which LangChain marks by `lc_source`, is none."""
    return [one for one in messages if isinstance(one, HumanMessage) and "lc_source" not in one.additional_kwargs]


def _by_people(messages: Sequence[BaseMessage], own: Mapping[str, Any]) -> list[str]:
    """The ids of all messages in a person's name so far: one that a middleware adds in a run is none of a person's."""
    return list(dict.fromkeys([*own.get("known", ()), *(str(one.id) for one in _people(messages))]))


def _closed(messages: Sequence[BaseMessage], own: Mapping[str, Any]) -> list[str]:
    """The tools that are closed when an agent begins to run.

    A state that knows nothing reads its messages: a client may send the whole conversation each time.
    """
    new = {message.id for message in _people(messages)}.difference(own.get("known", ()))
    if own:
        return [] if new else own["closed"]
    closed = set[str]()
    for message in messages:
        if isinstance(message, ToolMessage) and message.additional_kwargs.get(METADATA_KEY) == _BLOCKED:
            closed.add(message.name or "")
        elif message.id in new:
            closed.clear()
    return sorted(closed)
