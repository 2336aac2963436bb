"""An agent's streams show nothing of a withheld message, where the naive middleware shows all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyMiddleware, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel

from .agents import ASKED, ToolCaller, counting_tool, spoken, streamed
from .support import EVERYTHING, NOTHING, QUESTION, Ledger, Wire, collect


class Naive(AgentMiddleware):
    """The first attempt: look at the response, and return another."""

    def wrap_model_call(self, request: Any, handler: Any) -> AIMessage:
        (draft,) = handler(request).result
        verdict = get_verdict(draft)
        assert verdict is not None
        assert not NOTHING.lets_through(verdict.uncertainty)
        return AIMessage("No.")

    async def awrap_model_call(self, request: Any, handler: Any) -> AIMessage:
        (draft,) = (await handler(request)).result
        assert get_verdict(draft) is not None
        return AIMessage("No.")


@pytest.fixture(params=[True, False], ids=["sync", "async"])
def sync(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=["answer", "abstain", "escalate", "scored"])
def case(request: pytest.FixtureRequest, draft: str, larger: LanguageModel) -> tuple[UncertaintyMiddleware, str]:
    """A middleware, and its answer to `QUESTION`."""
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    return {
        "answer": lambda: (UncertaintyMiddleware(EVERYTHING), draft),
        "abstain": lambda: (UncertaintyMiddleware(NOTHING, abstain_message="No."), "No."),
        "escalate": lambda: (UncertaintyMiddleware(NOTHING, escalate_to=RunnableLambda(lambda _: "Help.")), "Help."),
        "scored": lambda: (UncertaintyMiddleware(NOTHING, escalate_to=second), second.invoke(QUESTION).text),
    }[request.param]()


def test_the_naive_middleware_leaks(chat: ChatSemGrad, draft: str, sync: bool) -> None:
    pieces = streamed(create_agent(chat, [], middleware=[Naive()]), ASKED, sync=sync)
    assert spoken(pieces) == draft + "No.", "should this fail, LangChain has learnt to hold drafts back"


def test_message_streams(
    chat: ChatSemGrad, case: tuple[UncertaintyMiddleware, str], draft: str, sync: bool, ledger: Ledger
) -> None:
    middleware, expected = case
    wire = Wire()
    agent = create_agent(chat, [], middleware=[middleware])
    pieces = streamed(agent, ASKED, {"callbacks": [wire, ledger]}, sync=sync)
    assert spoken(pieces) == expected
    assert expected == draft or draft not in repr(pieces)
    assert expected == draft or draft not in "".join(wire.tokens), "no handler hears tokens of a draft either"
    assert [m.response_metadata["semgrad_guard"]["enforced"] for m, _ in pieces if m.text] == [True]
    ledger.assert_balanced()


def test_a_model_that_streams_by_itself_is_quiet_too(language_model: LanguageModel, draft: str, sync: bool) -> None:
    wires = Wire(), Wire()
    for wire, mode in zip(wires, ("enforce", "annotate"), strict=True):
        chat = ChatSemGrad.from_model(language_model, max_tokens=12, streaming=True)
        agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING, mode=mode)])
        streamed(agent, ASKED, {"callbacks": [wire]}, sync=sync, mode="values")
    assert ["".join(wire.tokens) for wire in wires] == ["I don't know.", draft]


def test_a_guarded_run_keeps_its_own_tags(chat: ChatSemGrad, sync: bool, ledger: Ledger) -> None:
    agent = create_agent(chat.model_copy(update={"tags": ["mine"]}), [], middleware=[UncertaintyMiddleware(NOTHING)])
    streamed(agent, ASKED, {"callbacks": [ledger]}, sync=sync)
    assert [("mine" in (run.tags or []), "nostream" in (run.tags or [])) for run in ledger.models()] == [(True, False)]


@pytest.mark.parametrize("mode", ["annotate", "observe"])
def test_what_is_not_withheld_streams_live(chat: ChatSemGrad, draft: str, sync: bool, mode: Any) -> None:
    pieces = streamed(create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING, mode=mode)]), ASKED, sync=sync)
    assert spoken(pieces) == draft
    assert len(pieces) > 5


def test_updates_and_values(chat: ChatSemGrad, draft: str, sync: bool) -> None:
    agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING)])
    assert draft not in repr(streamed(agent, ASKED, sync=sync, mode=["updates", "values", "custom"]))


def test_withheld_tool_calls_are_not_shown(chat: ChatSemGrad, sync: bool) -> None:
    runs: list[str] = []
    middleware = UncertaintyMiddleware(NOTHING)
    agent = create_agent(ToolCaller(scored=chat), [counting_tool("speak", runs)], middleware=[middleware])
    assert "call-speak" not in repr(streamed(agent, ASKED, sync=sync, mode=["messages", "updates", "values"]))
    allowing = create_agent(
        ToolCaller(scored=chat), [counting_tool("speak", runs)], middleware=[UncertaintyMiddleware(EVERYTHING)]
    )
    shown = [message for message, _ in streamed(allowing, ASKED, sync=sync)]
    assert [call["name"] for message in shown for call in getattr(message, "tool_calls", [])] == ["speak"]
    assert runs == ["speak"]


def test_events_v2(chat: ChatSemGrad, case: tuple[UncertaintyMiddleware, str], draft: str) -> None:
    middleware, expected = case
    events = collect(create_agent(chat, [], middleware=[middleware]).astream_events(ASKED, version="v2"))
    chunks = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(chunks) == expected
    assert [event["name"] for event in events].count("semgrad_guard") == 1
    assert expected == draft or draft not in repr(events)


@pytest.mark.parametrize("guard", ["middleware", "router"])
@pytest.mark.parametrize("target", [False, True], ids=["abstain", "escalate"])
def test_events_v3(chat: ChatSemGrad, draft: str, sync: bool, guard: str, target: bool) -> None:
    escalate_to = RunnableLambda(lambda _: AIMessage("Help.")) if target else None
    config: Any = None
    if guard == "middleware":
        agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING, escalate_to=escalate_to)])
    else:
        agent = create_agent(chat, [])
        config = {"callbacks": [UncertaintyRouterCallback(policy=NOTHING, escalate_to=escalate_to)]}
    messages, events = _v3(agent, config) if sync else asyncio.run(_av3(agent, config))
    assert messages == ["Help." if target else "I don't know."]
    assert draft not in repr(events)


def test_events_v3_of_what_is_let_through(chat: ChatSemGrad, draft: str, sync: bool) -> None:
    agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(EVERYTHING)])
    messages, _ = _v3(agent, None) if sync else asyncio.run(_av3(agent, None))
    assert messages == [draft]


def _v3(agent: Any, config: Any) -> tuple[list[str], list[Any]]:
    """The texts of a run's messages, and the raw events of another run."""
    run = agent.stream_events(ASKED, config, version="v3")
    messages = [str(message.text) for message in run.messages]
    return messages, list(agent.stream_events(ASKED, config, version="v3"))


async def _av3(agent: Any, config: Any) -> tuple[list[str], list[Any]]:
    run = await agent.astream_events(ASKED, config, version="v3")
    messages = [str(await message.text) async for message in run.messages]
    again = await agent.astream_events(ASKED, config, version="v3")
    return messages, [event async for event in again]
