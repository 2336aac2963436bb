"""Whatever an agent's model node delivers carries this turn's decision: also with other middleware around the guard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ExtendedModelResponse,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    ModelRetryMiddleware,
    hook_config,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.callbacks import BaseCallbackHandler, adispatch_custom_event, dispatch_custom_event
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.messages.tool import tool_call
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.types import Command
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_semgrad_guard import ChatSemGrad, HumanReview, LowConfidenceError, UncertaintyMiddleware, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import UnenforcedPolicyError

from .agents import ASKED, RUNS, STREAM_MODES, counting_tool, streamed
from .support import EVERYTHING, NOTHING, QUESTION, Ledger, Wire, collect

LEAK = "Vienna, surely"
Handler = Callable[[Any], Any]


class Other(AgentMiddleware[Any, Any, Any]):
    """Another middleware: `reply` makes its response from the request and the handler."""

    def __init__(self, reply: Callable[[Any, Handler], Any]) -> None:
        super().__init__()
        self.reply = reply

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return self.reply(request, handler)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        loop = asyncio.get_running_loop()
        called = lambda request: asyncio.run_coroutine_threadsafe(handler(request), loop).result()  # noqa: E731
        return await asyncio.to_thread(self.reply, request, called)


class Reply(BaseModel):
    word: str


class Speaker(FakeListChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def speaker() -> Speaker:
    return Speaker(responses=[LEAK])


class Failing(Speaker):
    def _call(self, *args: Any, **kwargs: Any) -> str:
        raise ConnectionError


def _twice(request: Any, handler: Handler) -> Any:
    handler(request)
    return handler(request.override(model=speaker()))


def _changed(request: Any, handler: Handler) -> Any:
    message = handler(request).result[0]
    return ModelResponse(result=[message.model_copy(update={"content": LEAK})])


def _with_a_call(request: Any, handler: Handler) -> Any:
    message = handler(request).result[0]
    return message.model_copy(update={"tool_calls": [tool_call(name="wire", args={"word": LEAK}, id="1")]})


def _old_decision(request: Any, handler: Handler) -> Any:
    chat = ChatSemGrad(model="pocket", max_tokens=4)
    old = chat.invoke("Say something.")
    return old.model_copy(update={"content": LEAK})


STRANGERS: dict[str, Callable[[Any, Handler], Any]] = {
    "overrides the model": lambda request, handler: handler(request.override(model=speaker())),
    "asks a new request": lambda request, handler: handler(
        ModelRequest(model=speaker(), messages=request.messages, state=request.state, runtime=request.runtime)
    ),
    "answers itself": lambda request, handler: AIMessage(LEAK),
    "asks a model itself": lambda request, handler: speaker().invoke(request.messages),
    "streams a model itself": lambda request, handler: AIMessage(
        "".join(chunk.text for chunk in speaker().stream(request.messages))
    ),
    "asks a chain": lambda request, handler: (
        RunnableLambda(speaker().invoke) | RunnableLambda(lambda message: message)
    ).invoke(request.messages),
    "asks an agent": lambda request, handler: create_agent(speaker()).invoke({"messages": request.messages})[
        "messages"
    ][-1],
    "asks twice": _twice,
    "changes the text": _changed,
    "adds a call": _with_a_call,
    "repeats an old message": _old_decision,
    "returns a structure": lambda request, handler: ModelResponse(
        result=[AIMessage(LEAK)], structured_response=Reply(word=LEAK)
    ),
    "extends its response": lambda request, handler: ExtendedModelResponse(
        ModelResponse(result=[AIMessage("fine"), AIMessage(LEAK)]), Command(update={})
    ),
}


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest) -> Other:
    return Other(STRANGERS[request.param])


def guard(policy: Policy = NOTHING, **options: Any) -> UncertaintyMiddleware:
    return UncertaintyMiddleware(policy, abstain_message="No.", **options)


def agent_of(chat: Any, *middleware: Any, runs: list[str] | None = None, **options: Any) -> Any:
    tools = [] if runs is None else [counting_tool("wire", runs)]
    return create_agent(chat, tools, middleware=list(middleware), **options)


@pytest.mark.parametrize("how", RUNS)
def test_a_strangers_message_is_judged(
    stranger: Other, how: str, chat: ChatSemGrad, wire: Wire, ledger: Ledger
) -> None:
    chat = Bound.of(chat)
    runs: list[str] = []
    agent = agent_of(chat, guard(), stranger, runs=runs)
    state = RUNS[how](agent, ASKED, {"callbacks": [wire, ledger]})
    last = state["messages"][-1]
    assert (last.text, runs) == ("No.", [])
    verdict = get_verdict(last)
    assert verdict is not None
    assert (verdict.action, verdict.enforced) == ("abstain", True)
    assert LEAK not in repr(state)
    assert "Vienna" not in repr([wire.tokens, wire.results, [run.outputs for run in ledger.runs]])
    with pytest.raises(LowConfidenceError):
        RUNS[how](agent_of(chat, guard(mode="raise"), stranger), ASKED, None)


class Bound(ChatSemGrad):
    """Takes tools, though its template knows none."""

    @classmethod
    def of(cls, chat: ChatSemGrad) -> Bound:
        return cls.from_model(chat.language_model, max_tokens=chat.max_tokens)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind()


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_no_stream_shows_a_strangers_message(stranger: Other, sync: bool, chat: ChatSemGrad) -> None:
    agent = agent_of(Bound.of(chat), guard(), stranger, checkpointer=InMemorySaver())
    pieces = streamed(agent, ASKED, {"configurable": {"thread_id": "1"}}, sync=sync, mode=STREAM_MODES)
    assert "Vienna" not in repr(pieces)
    assert {mode for mode, _ in pieces} >= set(STREAM_MODES) - {"custom"}
    assert [piece[0].text for mode, piece in pieces if mode == "messages"][-1:] == ["No."]


def test_no_event_shows_a_strangers_message(stranger: Other, chat: ChatSemGrad) -> None:
    agent = agent_of(Bound.of(chat), guard(), stranger)
    events = collect(agent.astream_events(ASKED, version="v2"))
    assert "Vienna" not in repr(events)
    assert "".join(e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream").endswith("No.")


@pytest.mark.parametrize("how", RUNS)
def test_a_strangers_message_is_delivered_where_its_score_allows(
    how: str, chat: ChatSemGrad, language_model: LanguageModel, wire: Wire
) -> None:
    scoring = guard(EVERYTHING, scorer=language_model)
    agent = agent_of(chat, scoring, Other(STRANGERS["overrides the model"]))
    last = RUNS[how](agent, ASKED, {"callbacks": [wire]})["messages"][-1]
    verdict = get_verdict(last)
    assert verdict is not None
    assert (last.text, verdict.status, verdict.action) == (LEAK, "scored", "answer")
    assert [result.generations[0][0].text for result in wire.results] == [LEAK]


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["annotate", "observe"])
def test_a_strangers_message_is_live_once_where_nothing_is_withheld(chat: ChatSemGrad, mode: Any, sync: bool) -> None:
    agent = agent_of(chat, guard(mode=mode), Other(STRANGERS["overrides the model"]))
    pieces = streamed(agent, ASKED, sync=sync, mode=["messages", "updates"])
    assert "".join(piece[0].text for kind, piece in pieces if kind == "messages") == LEAK
    message = next(piece["model"]["messages"][-1] for kind, piece in pieces if kind == "updates" and "model" in piece)
    verdict = get_verdict(message)
    if mode == "annotate":
        assert verdict is not None
        assert (verdict.action, verdict.enforced) == ("abstain", False)
    else:
        assert verdict is None


@pytest.mark.parametrize("how", RUNS)
def test_a_fallback_is_judged(how: str, chat: ChatSemGrad) -> None:
    agent = agent_of(Failing(responses=["x"]), guard(), ModelFallbackMiddleware(speaker()))
    assert RUNS[how](agent, ASKED, None)["messages"][-1].text == "No."
    agent = agent_of(Failing(responses=["x"]), guard(EVERYTHING), ModelFallbackMiddleware(chat))
    verdict = get_verdict(RUNS[how](agent, ASKED, None)["messages"][-1])
    assert verdict is not None
    assert (verdict.action, verdict.status) == ("answer", "scored")


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("name", ["answers itself", "changes the text", "adds a call", "repeats an old message"])
def test_in_the_other_order_it_is_judged_after_the_node(how: str, name: str, chat: ChatSemGrad) -> None:
    runs: list[str] = []
    agent = agent_of(Bound.of(chat), Other(STRANGERS[name]), guard(), runs=runs)
    state = RUNS[how](agent, ASKED, None)
    assert (state["messages"][-1].text, runs, len(state["messages"])) == ("No.", [], 2)
    with pytest.raises(LowConfidenceError):
        RUNS[how](agent_of(chat, Other(STRANGERS[name]), guard(mode="raise")), ASKED, None)


def test_a_command_and_a_hook_are_judged_after_the_node(chat: ChatSemGrad) -> None:
    command = Command(update={"messages": [AIMessage(LEAK, tool_calls=[tool_call(name="wire", args={}, id="1")])]})
    runs: list[str] = []
    extending = Other(lambda request, handler: ExtendedModelResponse(handler(request), command))
    state = agent_of(Bound.of(chat), guard(), extending, runs=runs).invoke(ASKED)
    assert (state["messages"][-1].text, runs) == ("No.", [])

    class Hook(AgentMiddleware[Any, Any, Any]):
        def after_model(self, state: Any, runtime: Any) -> Any:
            return {"messages": [state["messages"][-1].model_copy(update={"content": LEAK})]}

    state = agent_of(chat, guard(EVERYTHING), Hook()).invoke(ASKED)
    assert [message.text for message in state["messages"]] == [QUESTION, "No."]


@pytest.mark.parametrize("how", RUNS)
def test_a_hook_that_jumps_to_the_end_is_judged(how: str, chat: ChatSemGrad) -> None:
    class Jump(AgentMiddleware[Any, Any, Any]):
        @hook_config(can_jump_to=["end"])
        def after_model(self, state: Any, runtime: Any) -> Any:
            changed = state["messages"][-1].model_copy(update={"content": LEAK})
            return {"messages": [changed], "jump_to": "end"}

    state = RUNS[how](agent_of(chat, guard(EVERYTHING), Jump()), ASKED, None)
    assert [message.text for message in state["messages"]] == [QUESTION, "No."]

    class First(AgentMiddleware[Any, Any, Any]):
        @hook_config(can_jump_to=["end"])
        def before_model(self, state: Any, runtime: Any) -> Any:
            return {"messages": [AIMessage(LEAK)], "jump_to": "end"}

    for order in ([guard(EVERYTHING), First()], [First(), guard(EVERYTHING)]):
        state = RUNS[how](agent_of(chat, *order), ASKED, None)
        assert [message.text for message in state["messages"]] == [QUESTION, "No."]

    class Early(AgentMiddleware[Any, Any, Any]):
        @hook_config(can_jump_to=["end"])
        def after_model(self, state: Any, runtime: Any) -> Any:
            return {"jump_to": "end"}

    policy = Policy(threshold=-1.0, on_unscored="escalate")
    reviewed = agent_of(chat, guard(policy, escalate_to=HumanReview()), Early(), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    assert "__interrupt__" in RUNS[how](reviewed, ASKED, config)
    approved = RUNS[how](reviewed, Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert len(approved["messages"]) == 2
    assert approved["messages"][-1].text


def test_earlier_turns_and_a_users_own_messages_are_left_alone(chat: ChatSemGrad) -> None:
    agent = agent_of(chat, guard(EVERYTHING), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    given = {"messages": [("human", "Hello?"), ("ai", "given"), ("human", QUESTION), ("ai", "begun")]}
    first = agent.invoke(given, config)["messages"]
    second = agent.invoke(ASKED, config)["messages"]
    assert [message.text for message in second[:5]] == [message.text for message in first]
    assert first[1].text, first[3].text == ("given", "begun")


def test_a_structured_response_of_withheld_words_is_not_delivered(chat: ChatSemGrad) -> None:
    agent = agent_of(
        Bound.of(chat), guard(), Other(STRANGERS["returns a structure"]), response_format=ToolStrategy(Reply)
    )
    with pytest.raises(LowConfidenceError, match="owes a structured response"):
        agent.invoke(ASKED)


class Told(TypedDict):
    word: str


class Speaking(Bound):
    """Gives the structure as a call of the schema's tool."""

    def _drafted(self, call: Any) -> Any:
        return self._called((yield from super()._drafted(call)))

    def _called(self, result: Any) -> Any:
        message = result.generations[0].message
        calls = [tool_call(name=type(self).__name__, args={"word": "fine"}, id="1")]
        result.generations[0].message = message.model_copy(update={"tool_calls": calls})
        return result


@pytest.mark.parametrize("first", [True, False], ids=["guard first", "guard last"])
@pytest.mark.parametrize("schema", [Reply, Told])
def test_a_structure_that_was_put_in_its_place_is_refused(chat: ChatSemGrad, schema: Any, first: bool) -> None:
    def swapped(request: Any, handler: Handler) -> Any:
        response = handler(request)
        assert response.structured_response == schema(word="fine")
        response.structured_response = schema(word=LEAK)
        return response

    model = type(schema.__name__, (Speaking,), {}).of(chat)
    order = [guard(EVERYTHING), Other(swapped)]
    for how in RUNS.values():
        with pytest.raises(UnenforcedPolicyError, match="structured response"):
            how(agent_of(model, *order[:: 1 if first else -1], response_format=ToolStrategy(schema)), ASKED, None)
    plain = agent_of(model, guard(EVERYTHING), response_format=ToolStrategy(schema))
    assert plain.invoke(ASKED)["structured_response"] == schema(word="fine")


def test_what_code_aside_may_do(chat: ChatSemGrad) -> None:
    """Its custom events and stream writes go out; its subgraphs and models are not heard."""
    noted: list[str] = []

    class Events(BaseCallbackHandler):
        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            noted.append(name)

    def say(request: Any, handler: Handler) -> Any:
        dispatch_custom_event("mine", {})
        RunnableLambda(lambda _: dispatch_custom_event("nested", {})).invoke(1)
        get_stream_writer()("written")
        return handler(request)

    agent = agent_of(chat, guard(EVERYTHING), Other(say))
    assert list(agent.stream(ASKED, {"callbacks": [Events()]}, stream_mode="custom")) == ["written"]
    assert noted == ["mine", "nested", "semgrad_guard"]

    async def asay(request: Any, handler: Any) -> Any:
        await adispatch_custom_event("mine", {})
        return await handler(request)

    other = Other(say)
    other.awrap_model_call = asay  # type: ignore[method-assign]
    events = collect(agent_of(chat, guard(EVERYTHING), Other(say)).astream_events(ASKED, version="v2"))
    assert [e["name"] for e in events if e["event"] == "on_custom_event"] == ["mine", "nested", "semgrad_guard"]


def test_a_person_decides_about_a_strangers_message_once(chat: ChatSemGrad) -> None:
    agent = agent_of(
        chat,
        guard(Policy(threshold=-1.0, on_unscored="escalate"), escalate_to=HumanReview()),
        Other(STRANGERS["overrides the model"]),
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "1"}}
    waiting = agent.invoke(ASKED, config)
    (question,) = waiting["__interrupt__"][0].value["action_requests"]
    assert question["args"] == {"text": LEAK}
    state = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert [message.text for message in state["messages"]] == [QUESTION, LEAK]


@pytest.mark.parametrize("how", RUNS)
def test_a_retry_that_goes_on_does_not_deliver_an_error_as_an_answer(how: str, chat: ChatSemGrad) -> None:
    retry = ModelRetryMiddleware(max_retries=1, on_failure="continue", initial_delay=0, jitter=False)
    with pytest.raises(LowConfidenceError):
        RUNS[how](agent_of(chat, retry, guard(mode="raise")), ASKED, None)
