"""A guarded run ends with the outcome, and so whatever LangChain makes of a run holds the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import UsageMetadataCallbackHandler, get_usage_metadata_callback
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from tests.pairwise import pairwise

from .agents import ASKED
from .served import Served
from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, Ledger, Route, Wire, collect, text_of

WITHHELD = "WITHHELD-MSG"

GUARDS: dict[str, Callable[[ChatSemGrad], Runnable[Any, Any]]] = {
    "guard": lambda chat: GuardedChatModel(chat, NOTHING, abstain_message=WITHHELD),
    "callback": lambda chat: chat.model_copy(
        update={"callbacks": [UncertaintyRouterCallback(NOTHING, abstain_message=WITHHELD)]}
    ),
    "with_config": lambda chat: chat.with_config(
        callbacks=[UncertaintyRouterCallback(NOTHING, abstain_message=WITHHELD)]
    ),
    "served": lambda chat: GuardedChatModel(
        Served(weights=chat.language_model), NOTHING, scorer=chat.language_model, abstain_message=WITHHELD
    ),
}


@pytest.fixture(params=GUARDS)
def guarded(request: pytest.FixtureRequest, chat: ChatSemGrad) -> Runnable[Any, Any]:
    """A guarded model, by every way to guard one."""
    return GUARDS[request.param](chat)


def test_a_history_holds_what_was_delivered(guarded: Runnable[Any, Any], route: Route, draft: str) -> None:
    history = InMemoryChatMessageHistory()
    chat = RunnableWithMessageHistory(guarded, lambda _: history)
    config = {"configurable": {"session_id": "1"}}
    for _ in range(2):
        assert text_of(route(chat, QUESTION, config)) == WITHHELD
    assert [m.text for m in history.messages] == [QUESTION, WITHHELD] * 2
    assert draft not in repr(history.messages)


def test_listeners_hear_what_was_delivered(guarded: Runnable[Any, Any], route: Route, draft: str) -> None:
    noted: list[Any] = []
    listened = guarded.with_listeners(on_end=lambda run: noted.append(run.outputs))
    assert text_of(route(listened, QUESTION, {})) == WITHHELD
    assert WITHHELD in repr(noted)
    assert draft not in repr(noted)


def test_any_token_handler_hears_what_was_delivered(guarded: Runnable[Any, Any], draft: str) -> None:
    for name in ("stream", "astream"):
        wire = Wire()
        ROUTES[name](guarded, QUESTION, {"callbacks": [wire]})
        assert "".join(wire.tokens) == WITHHELD
        assert [result.generations[0][0].text for result in wire.results] == [WITHHELD]


def test_traces_hold_no_draft(guarded: Runnable[Any, Any], route: Route, draft: str, ledger: Ledger) -> None:
    route(guarded, QUESTION, {"callbacks": [ledger]})
    assert WITHHELD in repr([run.outputs for run in ledger.runs])
    assert draft not in repr([run.outputs for run in ledger.runs])
    ledger.assert_balanced()


def test_traces_hold_a_draft_on_request(chat: ChatSemGrad, draft: str, ledger: Ledger) -> None:
    served = Served(weights=chat.language_model)
    guard = GuardedChatModel(served, NOTHING, scorer=chat.language_model, keep_draft=True)
    guard.invoke(QUESTION, {"callbacks": [ledger]})
    outer, inner = ledger.models()
    assert inner.parent_run_id == outer.id
    assert draft in repr(inner.outputs)
    assert outer.outputs is not None
    assert (
        outer.outputs["generations"][0][0]["message"]["kwargs"]["response_metadata"]["semgrad_guard"]["draft"] == draft
    )


@pytest.mark.parametrize("guard", ["router", "guard", "middleware"])
def test_tags_and_metadata_are_the_models_own(chat: ChatSemGrad, guard: str, draft: str) -> None:
    joking = chat.model_copy(update={"tags": ["joke"], "metadata": {"mine": 1}})
    if guard == "middleware":
        model: Any = create_agent(joking, [], middleware=[UncertaintyMiddleware(NOTHING)])
        given: Any = ASKED
    else:
        callbacks = [UncertaintyRouterCallback(NOTHING)]
        model = joking.with_config(callbacks=callbacks) if guard == "router" else GuardedChatModel(joking, NOTHING)
        given = QUESTION
    events = collect(model.astream_events(given, version="v2", include_tags=["joke"]))
    assert {event["event"] for event in events} >= {"on_chat_model_start", "on_chat_model_end"}
    assert all(event["metadata"]["mine"] == 1 for event in events)
    assert all(event["metadata"]["ls_provider"] == "semgrad_guard" for event in events)


def test_a_hidden_models_text_stays_hidden(chat: ChatSemGrad) -> None:
    guard = GuardedChatModel(chat.model_copy(update={"tags": ["nostream"]}), NOTHING)
    graph: Any = StateGraph(dict)
    graph.add_node("node", lambda _: {"said": len(guard.invoke(QUESTION).text)})
    graph.add_edge(START, "node")
    assert list(graph.compile().stream({}, stream_mode="messages")) == []


@pytest.mark.parametrize(
    "how", [name for name in GUARDS if name != "with_config"]
)  # which hides the context's callbacks
def test_one_message_has_one_id(chat: ChatSemGrad, how: str) -> None:
    guarded = GUARDS[how](chat)
    ends: list[Any] = []
    node = RunnableLambda(lambda _: guarded.invoke(QUESTION))
    for event in collect(node.astream_events("go", version="v2")):
        if event["event"] == "on_chat_model_stream":
            ends.append(event["data"]["chunk"].id)
        if event["event"] == "on_chat_model_end":
            ends.append(event["data"]["output"].id)
    assert len(set(ends)) == 1
    assert len(ends) >= 2


def test_an_agents_checkpoints_and_streams_hold_what_was_delivered(chat: ChatSemGrad, draft: str) -> None:
    saver = InMemorySaver()
    config: Any = {"configurable": {"thread_id": "1"}}
    agent: Any = create_agent(GuardedChatModel(chat, NOTHING, abstain_message=WITHHELD), [], checkpointer=saver)
    shown = list(agent.stream(ASKED, config, stream_mode=["messages", "updates", "values", "custom", "checkpoints"]))
    assert WITHHELD in repr(shown)
    assert draft not in repr(shown)
    assert draft not in repr([state.values for state in agent.get_state_history(config)])
    reply = "".join(m.text for mode, (m, *_) in [s for s in shown if s[0] == "messages"])
    assert reply == WITHHELD


# Tokens.


class Answers(GenericFakeChatModel):
    """A model that reports its tokens."""

    def __init__(self, text: str, *, tokens: int, name: str) -> None:
        usage = {"input_tokens": tokens, "output_tokens": tokens, "total_tokens": 2 * tokens}
        message = AIMessage(text, usage_metadata=usage, response_metadata={"model_name": name})  # type: ignore[arg-type]
        super().__init__(messages=iter([message] * 100))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_are_counted_once(language_model: LanguageModel, asynchronous: bool, streamed: bool) -> None:
    def reply(model: Any) -> dict[str, Any]:
        with get_usage_metadata_callback() as counted:
            if streamed and asynchronous:
                collect(model.astream(QUESTION))
            elif streamed:
                list(model.stream(QUESTION))
            elif asynchronous:
                asyncio.run(model.ainvoke(QUESTION))
            else:
                model.invoke(QUESTION)
        return counted.usage_metadata

    served = Answers("Vienna", tokens=3, name="served")
    guard = GuardedChatModel(served, EVERYTHING, scorer=language_model)
    assert reply(guard)["served"]["total_tokens"] == 6
    target = Answers("Ulan", tokens=10, name="target")
    escalating = GuardedChatModel(served, NOTHING, scorer=language_model, escalate_to=target)
    assert sum(usage["total_tokens"] for usage in reply(escalating).values()) == 26, "the draft's and the target's"


def test_a_handler_in_the_config_counts_once_too(language_model: LanguageModel) -> None:
    handler = UsageMetadataCallbackHandler()
    served = Answers("Vienna", tokens=3, name="served")
    GuardedChatModel(served, EVERYTHING, scorer=language_model).invoke(QUESTION, {"callbacks": [handler]})
    assert handler.usage_metadata["served"]["total_tokens"] == 6


# Targets.


class Deaf(Runnable[Any, AIMessage]):
    """A target that calls a model and passes no config on."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return self.model.invoke(input)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return await self.model.ainvoke(input)


@pytest.mark.parametrize("sync", [True, False])
def test_a_targets_stream_reaches_nobody_twice(chat: ChatSemGrad, sync: bool) -> None:
    deaf = Deaf(FakeListChatModel(responses=["Ulaanbaatar"]))
    agent: Any = create_agent(GuardedChatModel(chat, NOTHING, escalate_to=deaf), [])
    if sync:
        pieces = list(agent.stream(ASKED, stream_mode="messages"))
    else:
        pieces = collect(agent.astream(ASKED, stream_mode="messages"))
    assert [m.text for m, _ in pieces if m.text] == ["Ulaanbaatar"]


def test_a_verdict_speaks_of_what_was_delivered(chat: ChatSemGrad, larger: LanguageModel) -> None:
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    alone = get_verdict(second.invoke(QUESTION))
    message = GuardedChatModel(chat, NOTHING, escalate_to=second).invoke(QUESTION)
    verdict, drafted = get_verdict(message), get_verdict(chat.invoke(QUESTION))
    assert verdict is not None
    assert alone is not None
    assert drafted is not None
    assert verdict.uncertainty == pytest.approx(alone.uncertainty, rel=1e-4)
    assert verdict.escalated_from is not None
    assert verdict.escalated_from.uncertainty == pytest.approx(drafted.uncertainty, rel=1e-4)
    both = [m.usage_metadata["total_tokens"] for m in (chat.invoke(QUESTION), second.invoke(QUESTION))]  # type: ignore[index]
    assert message.usage_metadata is not None
    assert message.usage_metadata["total_tokens"] == sum(both)


def test_words_may_depend_on_the_verdict(chat: ChatSemGrad, route: Route) -> None:
    guard = GuardedChatModel(chat, NOTHING, abstain_message=lambda verdict: f"No: {verdict.reason}")
    assert text_of(route(guard, QUESTION, {})).startswith("No: uncertainty")


def test_what_one_guard_withholds_no_other_lets_through(chat: ChatSemGrad, route: Route, draft: str) -> None:
    inner = GuardedChatModel(chat, NOTHING, abstain_message=WITHHELD)
    pieces = route(GuardedChatModel(inner, EVERYTHING, abstain_message="outer"), QUESTION, {})
    assert text_of(pieces) == WITHHELD
    (record,) = [p.response_metadata["semgrad_guard"] for p in pieces if "semgrad_guard" in p.response_metadata]
    assert (record["action"], record["promised"]) == ("abstain", False)


class Second(UncertaintyMiddleware):
    """Another middleware of the same kind (an agent takes each class once)."""


@pytest.mark.parametrize("strict_first", [True, False])
def test_what_one_middleware_withholds_no_other_lets_through(chat: ChatSemGrad, strict_first: bool) -> None:
    kinds = (UncertaintyMiddleware, Second) if strict_first else (Second, UncertaintyMiddleware)
    both = [kinds[0](NOTHING, abstain_message=WITHHELD), kinds[1](EVERYTHING)]
    middleware = both if strict_first else both[::-1]
    message = create_agent(chat, [], middleware=middleware).invoke(ASKED)["messages"][-1]  # type: ignore[call-overload]
    verdict = get_verdict(message)
    assert verdict is not None
    assert (message.text, verdict.action) == (WITHHELD, "abstain")


BLOCKS: dict[str, Callable[[ChatSemGrad, ChatSemGrad, Policy], Runnable[Any, Any]]] = {
    "callback": lambda blocks, plain, policy: blocks.with_config(callbacks=[UncertaintyRouterCallback(policy)]),
    "guard": lambda blocks, plain, policy: GuardedChatModel(blocks, policy),
    "the guard's own": lambda blocks, plain, policy: GuardedChatModel(plain, policy, output_version="v1"),
    "target": lambda blocks, plain, policy: GuardedChatModel(blocks, policy, escalate_to=plain),
}


@pairwise(route=ROUTES, name=BLOCKS, policy=[NOTHING, EVERYTHING], indirect=["route"])
def test_who_asks_for_content_blocks_gets_them(
    language_model: LanguageModel, policy: Policy, name: str, route: Route
) -> None:
    plain = ChatSemGrad.from_model(language_model, max_tokens=12)
    blocks = ChatSemGrad.from_model(language_model, max_tokens=12, output_version="v1")
    pieces = [piece for piece in route(BLOCKS[name](blocks, plain, policy), QUESTION, {}) if piece.content]
    assert pieces
    for piece in pieces:
        assert [block["type"] for block in piece.content] == ["text"]
        assert piece.response_metadata["output_version"] == "v1"
