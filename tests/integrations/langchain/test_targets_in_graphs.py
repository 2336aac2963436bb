"""Escalation targets that are part of the graph around a guard: they interrupt it, and write to its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    guarded,
)
from semgrad_guard import LanguageModel, Verdict
from semgrad_guard.errors import InputError

from .agents import ASKED, RUNS, STREAM_MODES, streamed
from .support import EVERYTHING, NOTHING, QUESTION, collect

CONFIG: Any = {"configurable": {"thread_id": "1"}}
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


class Decisions(list[Verdict]):
    """A log of decisions."""

    def write(self, verdict: Verdict, **_: Any) -> None:
        self.append(verdict)


def interrupts(_: Any) -> AIMessage:
    return AIMessage(f"{interrupt('Who is it?')} and {interrupt('And who else?')}")


def writes(_: Any) -> AIMessage:
    get_stream_writer()("looking it up")
    return AIMessage("Ann")


def graph_of(step: Callable[[Any], AIMessage], **options: Any) -> Any:
    def node(state: Any) -> Any:
        return {"messages": [step(state)]}

    return StateGraph(MessagesState).add_node("answer", node).add_edge(START, "answer").compile(**options)


TARGETS: dict[str, Callable[[Callable[[Any], AIMessage]], Runnable[Any, Any]]] = {
    "function": RunnableLambda,
    "graph": graph_of,
    "graph with a memory": lambda step: graph_of(step, checkpointer=InMemorySaver()),
    "last step of a chain": lambda step: RunnableLambda(lambda messages: messages) | RunnableLambda(step),
}


def in_a_node(model: Any) -> Any:
    async def anode(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    node = RunnableLambda(lambda state: {"messages": [model.invoke(state["messages"])]}, afunc=anode)
    return StateGraph(MessagesState).add_node("m", node).add_edge(START, "m").compile(checkpointer=InMemorySaver())


def agent_of(chat: ChatSemGrad, **options: Any) -> Any:
    guard = UncertaintyMiddleware(NOTHING, **options)
    return create_agent(chat, [], middleware=[guard], checkpointer=InMemorySaver())


FRONTS: dict[str, Callable[..., Any]] = {
    "GuardedChatModel": lambda chat, **options: in_a_node(GuardedChatModel(chat, NOTHING, **options)),
    "router": lambda chat, **options: in_a_node(
        chat.with_config(callbacks=[UncertaintyRouterCallback(NOTHING, **options)])
    ),
    "UncertaintyMiddleware": agent_of,
}


@BOTH
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("front", FRONTS)
def test_a_target_interrupts_the_graph_and_is_resumed(
    front: str, target: str, sync: bool, chat: ChatSemGrad, draft: str
) -> None:
    log = Decisions()
    graph = FRONTS[front](chat, escalate_to=TARGETS[target](interrupts), on_error="abstain", timeout=60, log=log)
    shown: list[Any] = []
    for given, question in ((ASKED, "Who is it?"), (Command(resume="Ann"), "And who else?")):
        shown += streamed(graph, given, CONFIG, sync=sync, mode=STREAM_MODES)
        state = graph.get_state(CONFIG, subgraphs=True)
        assert [one.value for one in state.interrupts] == [question]
        assert log == [], "nothing is decided yet"
    shown += streamed(graph, Command(resume="Bob"), CONFIG, sync=sync, mode=STREAM_MODES)
    assert graph.get_state(CONFIG).values["messages"][-1].text == "Ann and Bob"
    assert draft not in repr([shown, list(graph.get_state_history(CONFIG))])
    assert [decision.action for decision in log] == ["escalate"]


@BOTH
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("front", FRONTS)
def test_a_target_writes_to_the_stream(front: str, target: str, sync: bool, chat: ChatSemGrad, draft: str) -> None:
    graph = FRONTS[front](chat, escalate_to=TARGETS[target](writes))
    options: Any = {"stream_mode": STREAM_MODES, "subgraphs": True}
    run = graph.stream(ASKED, CONFIG, **options) if sync else collect(graph.astream(ASKED, CONFIG, **options))
    shown = list(run)
    assert [event for _, mode, event in shown if mode == "custom" and isinstance(event, str)] == ["looking it up"]
    deeper = {mode for namespace, mode, _ in shown if len(namespace) > 0}
    assert deeper <= {"custom"}, "a target's answer may be rejected: no state of its graph is shown"
    assert draft not in repr(shown)


@pytest.mark.parametrize("how", RUNS)
def test_a_target_sends_the_graph_elsewhere(how: str, chat: ChatSemGrad, draft: str) -> None:
    def to_a_person(state: Any) -> Any:
        return Command(graph=Command.PARENT, goto="person")

    target: Any = StateGraph(MessagesState).add_node("hand", to_a_person).add_edge(START, "hand").compile()
    guard = GuardedChatModel(chat, NOTHING, escalate_to=target)

    async def aask(state: Any) -> Any:
        return {"messages": [await guard.ainvoke(state["messages"])]}

    node = RunnableLambda(lambda state: {"messages": [guard.invoke(state["messages"])]}, afunc=aask)
    builder = StateGraph(MessagesState).add_node("m", node, destinations=("person",)).add_edge(START, "m")
    builder.add_node("person", lambda state: {"messages": [AIMessage("Ann")]})
    state = RUNS[how](builder.compile(), ASKED, None)
    assert state["messages"][-1].text == "Ann"
    assert draft not in repr(state)


@pytest.mark.parametrize("step", [interrupts, writes])
def test_without_a_graph_around_the_guard(step: Any, chat: ChatSemGrad) -> None:
    guard = GuardedChatModel(chat, NOTHING, escalate_to=RunnableLambda(step))
    with pytest.raises(InputError, match="not part of a graph"):
        guard.invoke(QUESTION)


def speaks_first(state: Any) -> Any:
    return {"messages": [AIMessage("Let me ask a person.")]}


@pytest.mark.parametrize("saved", [True, False], ids=["with a memory", "without"])
def test_an_interrupted_target_is_no_answer(saved: bool, chat: ChatSemGrad) -> None:
    """Its last message, said before it was interrupted, would be taken for one."""
    builder = StateGraph(MessagesState).add_node("say", speaks_first).add_edge(START, "say")
    builder = builder.add_node("answer", lambda state: {"messages": [interrupts(state)]}).add_edge("say", "answer")
    target = builder.compile(checkpointer=InMemorySaver() if saved else None)
    guard = GuardedChatModel(chat, NOTHING, escalate_to=target)
    with pytest.raises(InputError, match="was interrupted"):
        guard.invoke(QUESTION, CONFIG)


def a_chain(step: Any) -> Runnable[Any, Any]:
    return RunnableLambda[Any, Any](lambda messages: {"messages": messages}) | graph_of(step)


@pytest.mark.parametrize("made", [RunnableLambda, a_chain])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_guarded_chain_is_not_part_of_the_graph(made: Any, asynchronous: bool, language_model: LanguageModel) -> None:
    graph = in_a_node(guarded(made(interrupts), EVERYTHING, scorer=language_model))
    with pytest.raises(InputError, match="The chain inside a guard may not"):
        RUNS["ainvoke" if asynchronous else "invoke"](graph, ASKED, CONFIG)
