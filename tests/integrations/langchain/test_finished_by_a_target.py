"""A target that finishes an answer: its text is the same in messages, chunks, events, histories and caches."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    HumanReview,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, TEXT, FixedModel

from .support import Ledger

QUESTION, REPLY = "Hello", "Ask a cook."
FINISHED = f"{PIECES[0]}\n\n{REPLY}"
WITHHELD = [piece.strip() for piece in PIECES[1:]]


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> LanguageModel:
    return FixedModel.like(language_model)


@pytest.fixture(scope="module")
def between(fixed: LanguageModel) -> float:
    """A threshold that lets the first sentence through, and not the second one."""
    verdict = get_verdict(ChatSemGrad.from_model(fixed, by="sentence").invoke(QUESTION))
    assert verdict is not None
    first, second, _ = (one.uncertainty or 0.0 for one in verdict.sentences)
    assert first < second
    return (first + second) / 2


def made(fixed: LanguageModel, front: str, threshold: float, target: Any, **given: Any) -> tuple[BaseChatModel, Any]:
    chat = ChatSemGrad.from_model(fixed, by="sentence", on_doubt="escalate", cache=InMemoryCache())
    policy = Policy(threshold=threshold)
    if front == "router":
        return chat, [UncertaintyRouterCallback(policy, escalate_to=target, **given)]
    return GuardedChatModel(chat, policy, escalate_to=target, **given), []


@pytest.mark.parametrize("front", ["router", "guard"])
async def test_every_path_has_the_text_of_both(fixed: LanguageModel, between: float, front: str) -> None:
    received: list[Any] = []
    target = RunnableLambda(lambda messages: received.append(messages) or REPLY)
    model, router = made(fixed, front, between, target)
    ledger = Ledger()
    config: Any = {"callbacks": [*router, ledger]}
    message = model.invoke(QUESTION, config=config)
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.escalated is not None
    assert (message.content, verdict.text, verdict.escalated.text) == (FINISHED, FINISHED, REPLY)
    assert [one.action for one in verdict.sentences] == ["deliver", "escalate", "escalate"]
    chunks = list(model.stream(QUESTION, config=config))
    assert [chunk.content for chunk in chunks if chunk.content] == [PIECES[0], f"\n\n{REPLY}"]
    assert [chunk.content async for chunk in model.astream(QUESTION, config=config)] == [c.content for c in chunks]
    events = [event async for event in model.astream_events(QUESTION, config=config, version="v2")]

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"], config=config)]}

    graph: Any = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
    streamed = list(graph.stream({"messages": [("user", QUESTION)]}, stream_mode=["messages", "values"]))
    assert streamed[-1][1]["messages"][-1].content == FINISHED
    everywhere = repr([message, chunks, events, streamed, received, [run.outputs for run in ledger.runs]])
    assert not [piece for piece in WITHHELD if piece in everywhere]
    assert {len(messages) for messages in received} == {1}


@pytest.mark.parametrize("front", ["router", "guard"])
def test_without_a_reply_the_answer_ends(fixed: LanguageModel, between: float, front: str) -> None:
    def fail(_: Any) -> str:
        raise ConnectionError("gone")

    strict = GuardedChatModel(ChatSemGrad.from_model(fixed), Policy(threshold=0.0))
    for target in (None, RunnableLambda(fail), RunnableLambda(lambda _: ""), strict):
        model, router = made(fixed, front, between, target, on_error="abstain")
        config: Any = {"callbacks": router}
        assert model.invoke(QUESTION, config=config).content == f"{PIECES[0]}{CLOSING_LINE}"
        shown = [chunk.content for chunk in model.stream(QUESTION, config=config) if chunk.content]
        assert shown == [PIECES[0], CLOSING_LINE]


def test_two_guards(fixed: LanguageModel, between: float) -> None:
    second = GuardedChatModel(ChatSemGrad.from_model(fixed, by="sentence"), Policy(threshold=1e9))
    model, _ = made(fixed, "guard", between, second)
    verdict = get_verdict(model.invoke(QUESTION))
    assert verdict is not None
    assert verdict.escalated is not None
    assert (verdict.text, verdict.escalated.text) == (f"{PIECES[0]}\n\n{TEXT}", TEXT)
    assert len(verdict.escalated.sentences) == 3


def test_a_person_decides_about_whole_answers(fixed: LanguageModel, between: float) -> None:
    chat = ChatSemGrad.from_model(fixed, by="sentence", on_doubt="escalate")
    judge = UncertaintyMiddleware(Policy(threshold=between), escalate_to=HumanReview())
    agent: Any = create_agent(chat, middleware=[judge], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "one"}}
    state = agent.invoke({"messages": [("user", QUESTION)]}, config)
    assert (state["messages"][-1].content, "__interrupt__" in state) == (f"{PIECES[0]}{CLOSING_LINE}", False)
