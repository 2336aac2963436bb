"""Audiences (event streams, LangGraph's message streams) hear the outcome once, and nothing of a withheld draft."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from semgrad_guard import LanguageModel

from .support import EVERYTHING, NOTHING, QUESTION, Wire, collect


@pytest.fixture(params=["answer", "abstain", "escalate", "scored"])
def case(request: pytest.FixtureRequest, draft: str, larger: LanguageModel) -> tuple[UncertaintyRouterCallback, str]:
    """A router, and its answer to `QUESTION`."""
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    helper = RunnableLambda(lambda _: AIMessage(content="Help."))
    return {
        "answer": lambda: (UncertaintyRouterCallback(policy=EVERYTHING), draft),
        "abstain": lambda: (UncertaintyRouterCallback(policy=NOTHING, abstain_message="No."), "No."),
        "escalate": lambda: (UncertaintyRouterCallback(policy=NOTHING, escalate_to=helper), "Help."),
        "scored": lambda: (UncertaintyRouterCallback(policy=NOTHING, escalate_to=second), second.invoke(QUESTION).text),
    }[request.param]()


def _spoken(events: list[Any]) -> str:
    return "".join(e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream")


@pytest.mark.parametrize("in_chain", [False, True])
def test_events_tell_what_is_delivered(
    chat: ChatSemGrad, case: tuple[UncertaintyRouterCallback, str], draft: str, in_chain: bool, wire: Wire
) -> None:
    router, expected = case
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    model: Any = prompt | chat | StrOutputParser() if in_chain else chat
    question: Any = {"question": QUESTION} if in_chain else QUESTION
    events = collect(model.astream_events(question, {"callbacks": [router, wire]}, version="v2"))
    assert _spoken(events) == expected
    ends = [e["data"]["output"].text for e in events if e["event"] == "on_chat_model_end"]
    assert ends == [expected]
    assert [e["event"] for e in events].count("on_chat_model_start") == 1
    assert expected == draft or draft not in repr(events)
    if in_chain:
        assert events[-1]["data"]["output"] == expected
    assert sorted(map(str, wire.started)) == sorted(map(str, wire.ended))


def test_events_without_a_router_are_live(chat: ChatSemGrad, draft: str) -> None:
    events = collect(chat.astream_events(QUESTION, version="v2"))
    assert _spoken(events) == draft
    assert len([e for e in events if e["event"] == "on_chat_model_stream"]) > 5


@pytest.mark.parametrize("mode", ["sync", "async", "sync stream", "async stream"])
def test_message_streams_of_a_graph(
    chat: ChatSemGrad, case: tuple[UncertaintyRouterCallback, str], draft: str, mode: str
) -> None:
    graph = pytest.importorskip("langgraph.graph")
    router, expected = case

    def answer(state: Any) -> Any:
        if "stream" not in mode:
            return {"messages": [chat.invoke(state["messages"])]}
        (whole,) = chat.stream(state["messages"])
        return {"messages": [whole]}

    async def aanswer(state: Any) -> Any:
        if "stream" not in mode:
            return {"messages": [await chat.ainvoke(state["messages"])]}
        (whole,) = [chunk async for chunk in chat.astream(state["messages"])]
        return {"messages": [whole]}

    builder = graph.StateGraph(graph.MessagesState)
    builder.add_node("answer", aanswer if mode.startswith("async") else answer)
    builder.add_edge(graph.START, "answer")
    compiled, config = builder.compile(), {"callbacks": [router]}
    question = {"messages": [("human", QUESTION)]}
    if not mode.startswith("async"):
        pieces = list(compiled.stream(question, config, stream_mode="messages"))
    else:
        pieces = asyncio.run(_gather(compiled.astream(question, config, stream_mode="messages")))
    assert "".join(message.text for message, _ in pieces) == expected
    assert expected == draft or draft not in repr(pieces)


async def _gather(stream: Any) -> list[Any]:
    return [item async for item in stream]
