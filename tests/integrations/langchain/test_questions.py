"""`guarded` and `asking`: the first refused call ends a question, and nothing of it is altered."""

from __future__ import annotations

import asyncio
import copy
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough, RunnableWithMessageHistory
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Interrupt, interrupt
from typing_extensions import TypedDict

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    LowConfidenceError,
    UncertaintyRouterCallback,
    asking,
    calibrate_chain,
    guarded,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError, UnenforcedPolicyError

from .scripted import CANARY, SURE, WITHHELD, Scripted, router
from .support import Ear, Run, record_of, shown, unpickled, verdict_of
from .ways import collect

PROMPT = ChatPromptTemplate.from_template("{question}")


def echo(messages: Any) -> str:
    """Repeats the question; doubtful where it is about the canary."""
    return f"You said: {messages[-1].text}"


def model(rules: Any, **fields: Any) -> GuardedChatModel:
    return GuardedChatModel(Scripted(script=echo, **fields), rules)


def twice(rules: Any, *, second: str = "") -> Runnable[Any, Any]:
    """Two calls of a model, one after the other."""
    own = model(rules)
    return own | StrOutputParser() | (lambda text: f"{text} {second}") | own | StrOutputParser()


class Answer(TypedDict):
    answer: str
    context: str


def _rag(rules: Any) -> Runnable[Any, Any]:
    answer = (lambda given: given["question"]) | model(rules) | StrOutputParser()
    return (
        RunnablePassthrough.assign(context=lambda _: "a source") | RunnablePassthrough.assign(answer=answer)
    ).with_types(output_type=Answer)


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "text": (lambda rules: model(rules) | StrOutputParser(), CANARY, lambda out: out),
    "message": (model, CANARY, lambda out: out.text),
    "chain": (lambda rules: PROMPT | model(rules), {"question": CANARY}, lambda out: out.text),
    "state": (
        lambda rules: create_agent(model(rules), []),
        {"messages": [("human", CANARY)]},
        lambda out: out["messages"][-1].text,
    ),
    "answer": (_rag, {"question": CANARY}, lambda out: out["answer"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_abstention_has_the_form_of_the_chain(form: str, is_async: bool) -> None:
    make, given, text = FORMS[form]
    rules = router()
    chain = guarded(make(rules), rules)
    out = asyncio.run(chain.ainvoke(given)) if is_async else chain.invoke(given)
    assert text(out) == WITHHELD
    sure = copy.deepcopy(given) if not isinstance(given, str) else SURE
    if isinstance(sure, dict):
        sure = {"messages": [("human", SURE)]} if "messages" in sure else {"question": SURE}
    assert SURE in text(chain.invoke(sure))


def test_another_form_needs_words_of_its_own() -> None:
    rules = router()
    count = model(rules) | RunnableLambda(lambda message: len(message.text))
    with pytest.raises(InputError, match="give abstain="):
        guarded(count, rules)
    chain = guarded(count, rules, abstain=lambda given, verdict: (given, verdict.action, verdict.text))
    assert chain.invoke(CANARY) == (CANARY, "abstain", WITHHELD)
    assert chain.invoke(SURE) == len(f"You said: {SURE}")


class State(typing.TypedDict):
    """One of which pydantic makes no schema before Python 3.12."""

    messages: Annotated[list[Any], add_messages]


def test_a_graph_whose_state_has_no_schema() -> None:
    """Guarded, and as a target."""

    def graph(rules: Any, script: Any) -> Any:
        own = GuardedChatModel(Scripted(script=script), rules)
        node = RunnableLambda(lambda state: {"messages": [own.invoke(state["messages"])]})
        return StateGraph(State).add_node("answer", node).add_edge(START, "answer").compile()

    given, rules = {"messages": [HumanMessage(CANARY)]}, router()
    assert guarded(graph(rules, echo), rules).invoke(given)["messages"][-1].text == WITHHELD
    assert model(router(graph(False, SURE))).invoke(CANARY).text == SURE


def test_a_steps_schema_that_fails() -> None:
    rules = router()
    picked = RunnablePassthrough.assign(answer=PROMPT | model(rules) | StrOutputParser()).pick("answer")
    with pytest.raises(InputError, match="give abstain="):
        guarded(picked, rules)


def test_nothing_is_no_text() -> None:
    """Neither of a chain nor of its target."""
    rules = router(RunnableLambda(lambda _: None))
    silent = guarded(model(rules) | RunnableLambda(lambda _: None), rules, abstain=lambda _, verdict: verdict.text)
    assert silent.invoke(SURE) is None
    with pytest.raises(InputError, match="returned nothing"):
        silent.invoke(CANARY)


def test_the_first_refused_call_ends_all() -> None:
    rules = router()
    inner = Scripted(script=echo)
    own = GuardedChatModel(inner, rules)
    steps = [RunnableLambda(lambda text: own.invoke(text).text) for _ in range(3)]
    swallowing = RunnableLambda(lambda text: _swallowed(own, text))
    chain = guarded(swallowing | steps[0] | steps[1] | StrOutputParser(), rules)
    assert chain.invoke(CANARY) == WITHHELD
    assert len(inner.requests) == 1
    assert chain.invoke(SURE) == f"You said: You said: You said: {SURE}"


def _swallowed(own: Any, text: str) -> str:
    try:
        return own.invoke(text).text
    except LowConfidenceError:
        return "it continued"


def test_nobody_without_the_router() -> None:
    rules = router()
    for stranger in (Scripted(), FakeListChatModel(responses=["x"]), GuardedChatModel(Scripted()), model(router())):
        with pytest.raises(UnenforcedPolicyError, match="in the chain does not have"):
            guarded(stranger | StrOutputParser(), rules)
        hidden = RunnableLambda(lambda text, one=stranger: one.invoke(text).text)
        with pytest.raises(UnenforcedPolicyError):
            guarded(hidden, rules, abstain=lambda given, verdict: "").invoke("x")
        silenced = RunnableLambda(lambda text, one=stranger: one.invoke(text, {"callbacks": []}).text)
        with pytest.raises(UnenforcedPolicyError):
            guarded(silenced, rules, abstain=lambda given, verdict: "").invoke("x")


def test_nothing_guarded_has_answered() -> None:
    rules = router()
    chain = guarded(RunnableLambda(lambda text: "by code") | StrOutputParser(), rules)
    assert chain.invoke("x") == WITHHELD
    lenient = router(on_unscored="answer")
    assert guarded(RunnableLambda(lambda text: "by code") | StrOutputParser(), lenient).invoke("x") == "by code"


@pytest.mark.parametrize("how", ["thread", "bare thread", "executor"])
def test_threads(how: str) -> None:
    rules = router()
    own = model(rules)

    def run(text: str) -> str:
        replies = list[str]()

        def call() -> None:
            try:
                replies.append(own.invoke(text).text)
            except LowConfidenceError:
                replies.append("refused")

        if how == "executor":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(call).result()
        else:
            target = copy_context().run if how == "thread" else (lambda one: one())
            thread = threading.Thread(target=target, args=(call,))
            thread.start()
            thread.join()
        return replies[0]

    chain = guarded(RunnableLambda(run), rules, abstain=lambda given, verdict: verdict.text)
    assert CANARY not in chain.invoke(CANARY)


def test_histories_around_keep_question_and_abstention() -> None:
    rules, history = router(), InMemoryChatMessageHistory()
    chain = guarded((lambda messages: messages[-1].text) | model(rules), rules)
    talk = RunnableWithMessageHistory(chain, lambda session_id: history)
    talk.invoke([HumanMessage(CANARY)], {"configurable": {"session_id": "1"}})
    assert [message.text for message in history.messages] == [CANARY, WITHHELD]


def test_a_memory_inside_holds_no_draft() -> None:
    rules, memory = router(), InMemorySaver()
    agent = create_agent(GuardedChatModel(Scripted(), rules), [], checkpointer=memory)
    config: Any = {"configurable": {"thread_id": "1"}}
    assert guarded(agent, rules).invoke({"messages": [("human", "q")]}, config)["messages"][-1].text == WITHHELD
    assert [message.text for message in agent.get_state(config).values["messages"]] == ["q"]
    assert CANARY not in shown([list(memory.list(None)), dict(memory.blobs), dict(memory.writes)])


def test_the_caller_is_heard() -> None:
    rules, ear = router(), Ear()

    @tool
    def again(word: str) -> str:
        """Say it again."""
        return word

    def call(_: Any) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "again", "args": {"word": "x"}, "id": "1"}])

    rules = router(trusted_tools=["again"])
    agent = create_agent(GuardedChatModel(Scripted(script=call), rules), [again])
    with pytest.raises(GraphRecursionError):
        guarded(agent, rules).invoke({"messages": [("human", "q")]}, {"recursion_limit": 5})
    config: Any = {"callbacks": [ear], "tags": ["mine"], "metadata": {"user": "Ada"}, "run_name": "ask"}
    guarded(twice(rules), rules).invoke(SURE, config)
    first = ear.events[0]
    assert all(part in first for part in ("mine", "Ada", "ask", SURE))


def test_the_target_gets_the_input_and_answers_in_the_chains_form() -> None:
    inputs = list[Any]()
    target = RunnableLambda(lambda given: (inputs.append(given), "elsewhere")[1])
    rules = router(escalate_to=target)
    assert guarded(twice(rules), rules).invoke(CANARY) == "elsewhere"
    assert inputs == [CANARY]
    itself = router(escalate_to=RunnableLambda(lambda given: loop[0].invoke(given)))
    loop = [guarded(twice(itself), itself)]
    assert loop[0].invoke(CANARY) == WITHHELD


def test_errors() -> None:
    rules = router()
    parsing = guarded(model(rules) | JsonOutputParser(), rules, abstain=lambda given, verdict: None)
    assert parsing.invoke(CANARY) is None
    raising = router(mode="raise")
    for chain in (guarded(twice(raising), raising), guarded(twice(raising), raising).with_retry(stop_after_attempt=2)):
        with pytest.raises(LowConfidenceError) as caught:
            chain.invoke(f"{CANARY} xyzzy")
        assert f"replies: {CANARY} xyzzy" not in record_of(caught.value)
        assert caught.value.verdict.uncertainty is not None
        assert not [digit for digit in str(caught.value) if digit.isdigit()]


@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_interrupts_of_the_graph_around_pass(on_error: Any) -> None:
    rules = router(on_error=on_error)
    own = model(rules)
    chain = guarded(
        RunnableLambda(lambda text: own.invoke(f"{text} {interrupt('more?')}").text) | StrOutputParser(), rules
    )

    class State(TypedDict, total=False):
        text: str

    graph = (
        StateGraph(State).add_node("ask", lambda state: {"text": chain.invoke(state["text"])}).add_edge(START, "ask")
    )
    compiled: Any = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    assert "__interrupt__" in compiled.invoke({"text": SURE}, config)
    assert compiled.invoke(Command(resume="please"), config)["text"] == f"You said: {SURE} please"


# A graph that interrupts itself: a question in several runs.

SAID: Any = {"messages": [("human", "q")]}


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}}


def asks(state: Any) -> Any:
    return {"messages": [HumanMessage(interrupt("more?"))]}


@tool(description="Calls a person.")
def phone(number: str) -> str:
    return interrupt(f"{number}?")


def pausing(own: Any, place: str) -> Any:
    """A graph that asks a person: before the model writes, behind it, between two calls, in a graph or a tool of it."""
    if place == "tool":
        call = AIMessage("", tool_calls=[{"name": "phone", "args": {"number": "1"}, "id": "1", "type": "tool_call"}])
        own = own.model_copy(update={"model": Scripted(script=lambda turns: echo(turns) if len(turns) > 1 else call)})
        return create_agent(own, [phone], checkpointer=InMemorySaver())
    graph, last = StateGraph(MessagesState), START
    for name in ("write", "again"):
        graph.add_node(name, lambda state: {"messages": [own.invoke(state["messages"])]})
    inner = StateGraph(MessagesState).add_node("asks", asks).add_edge(START, "asks").compile()
    graph.add_node("ask", inner if place == "subgraph" else asks)
    graph.add_node("end", lambda state: {"messages": [AIMessage(state["messages"][-1].text)]})
    for name in {"behind": ["write", "ask", "end"], "between": ["write", "ask", "again"]}.get(place, ["ask", "write"]):
        last = graph.add_edge(last, name) and name
    return graph.compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("place", ["before", "behind", "between", "subgraph", "tool"])
@pytest.mark.parametrize("mode", ["enforce", "annotate", "raise"])
def test_a_graph_that_pauses_is_resumed_and_then_decided_about(place: str, mode: Any, run: Run) -> None:
    log: list[Any] = []
    rules = router(mode=mode, notify=log.append, trusted_tools=["phone"])
    chain = guarded(pausing(model(rules), place), rules)
    for name in ("1", "2"):  # at the same time
        assert [type(one) for one in run(chain, SAID, thread(name))["__interrupt__"]] == [Interrupt]
    assert log == []
    text = run(chain, Command(resume=SURE), thread("1"))["messages"][-1].text
    assert (text, [one.action for one in log]) == (SURE if place == "behind" else f"You said: {SURE}", ["answer"])
    with pytest.raises(LowConfidenceError) if mode == "raise" and place != "behind" else nullcontext():
        text = run(chain, Command(resume=CANARY), thread("2"))["messages"][-1].text
        assert (text == WITHHELD) == (mode == "enforce" and place != "behind")


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_breakpoint_is_a_pause(place: str, run: Run) -> None:
    """The first part of the question counts: its doubtful call is not forgotten at the second."""
    log: list[Any] = []
    rules = router(mode="annotate", notify=log.append)
    own, graph, last = model(rules), StateGraph(MessagesState), START
    for name in ["stop", "write"] if place == "before" else ["write", "stop", "again"]:
        graph.add_node(name, lambda state, name=name: {} if name == "stop" else {"messages": [own.invoke(CANARY)]})
        last = graph.add_edge(last, name) and name
    breakpoints: Any = {"interrupt_before": ["stop"]}
    chain: Any = guarded(graph.compile(checkpointer=InMemorySaver(), **breakpoints), rules)
    halted = run(chain, {"messages": [HumanMessage("q")]}, thread("1"))["messages"]
    assert (len(halted), log) == (1 if place == "before" else 2, [])
    assert len(run(chain, None, thread("1"))["messages"]) == len(halted) + 1
    assert [one.action for one in log] == ["abstain"]
    with pytest.raises(InputError, match="resumes"):
        calibrate_chain(chain, [(SAID, ["a"])], "contains", alpha=0.2, delta=0.2, progress=False)


def test_pauses_in_streams_and_forged_ones() -> None:
    rules = router()
    chain = guarded(pausing(model(rules), "before"), rules)
    for kind in ("values", "updates", ["updates", "custom"]):
        (pieces,) = chain.stream(SAID, thread(str(kind)), stream_mode=kind)
        assert "more?" in repr(pieces)
    assert chain.invoke(SAID, thread("v2"), version="v2").interrupts[0].value == "more?"
    passing = guarded(RunnablePassthrough(), rules, abstain=lambda given, verdict: verdict.text)
    assert passing.invoke({"answer": CANARY, "__interrupt__": [{"value": "more?", "id": "1"}]}) == WITHHELD
    with pytest.raises(InputError, match="resumes"):
        calibrate_chain(chain, [(SAID, ["a"])], "contains", alpha=0.2, delta=0.2, progress=False)


def test_a_pause_within_a_graph_around() -> None:
    rules = router()
    chain = guarded(pausing(model(rules), "behind"), rules)
    outer = StateGraph(MessagesState).add_node("ask", lambda state: chain.invoke({"messages": state["messages"][:1]}))
    graph = outer.add_edge(START, "ask").compile(checkpointer=InMemorySaver())
    assert "__interrupt__" in graph.invoke(SAID, thread("1"))
    assert graph.invoke(Command(resume=SURE), thread("1"))["messages"][-1].text == SURE


def test_a_pause_tells_nothing_about_the_next_question() -> None:
    own = model(rules := router())

    def write(state: Any) -> Any:
        own.invoke(state["messages"])
        return asks(state)

    graph = StateGraph(MessagesState).add_node("write", write).add_edge("write", "close")
    graph.add_node("close", lambda state: {"messages": [AIMessage(state["messages"][-1].text)]})
    graph.add_conditional_edges(START, lambda state: state["messages"][-1].text, {"skip": "close", SURE: "write"})
    chain: Any = guarded(graph.compile(checkpointer=InMemorySaver()), rules)
    for place in ("", "a place in a graph, as a client writes it"):
        config: Any = {"configurable": {"thread_id": "1", "checkpoint_ns": place}}
        assert "__interrupt__" in chain.invoke({"messages": [HumanMessage(SURE)]}, config)
        assert chain.invoke({"messages": [HumanMessage("skip")]}, config)["messages"][-1].text == WITHHELD


def test_copies_and_streams() -> None:
    rules = router()
    chain = guarded(PROMPT | GuardedChatModel(Scripted(), rules), rules)
    for one in (unpickled(chain), copy.deepcopy(chain), chain.with_config(tags=["x"])):
        assert one.invoke({"question": "q"}).text == WITHHELD
    pieces = list(guarded(twice(rules), rules).stream(SURE))
    assert len(pieces) == 1
    assert collect(guarded(twice(rules), rules).astream(CANARY)) == [WITHHELD]


@pytest.mark.parametrize("how", ["threads", "gather"])
def test_questions_at_the_same_time_do_not_mix(how: str, language_model: LanguageModel) -> None:
    rules = UncertaintyRouterCallback(Policy(threshold=1e9, on_cut="score"))
    chat = ChatSemGrad.from_model(language_model, max_tokens=6, router=rules)
    chain = guarded(chat | StrOutputParser() | chat, rules)
    questions = [f"Question {number}?" for number in range(24)]
    alone = [_scores(chain.invoke(question)) for question in questions]
    if how == "threads":
        with ThreadPoolExecutor(24) as pool:
            together = [_scores(message) for message in pool.map(chain.invoke, questions)]
    else:

        async def ask() -> list[Any]:
            return await asyncio.gather(*map(chain.ainvoke, questions))

        together = [_scores(message) for message in asyncio.run(ask())]
    for (text, score), (again, other) in zip(alone, together, strict=True):
        assert text == again
        assert score == pytest.approx(other, abs=1e-6)


def _scores(message: AIMessage) -> tuple[str, float | None]:
    verdict = verdict_of(message)
    return str(message.text), verdict.uncertainty


def test_asking_in_own_code() -> None:
    rules = router()
    with asking(rules) as question:
        assert model(rules).invoke(SURE).text
        assert question.refused is None
    with asking(rules) as question:
        model(rules).invoke(CANARY)
        raise AssertionError
    assert question.refused is not None
    with pytest.raises(UnenforcedPolicyError), asking(rules):
        Scripted().invoke("x")
    with pytest.raises(ZeroDivisionError), asking(rules):
        _ = 1 / 0


def test_a_stream_belongs_to_the_question_in_which_it_was_asked_for() -> None:
    rules = router()
    with asking(rules) as question:
        stream = model(rules).stream(CANARY)
    with pytest.raises(LowConfidenceError):
        list(stream)
    assert question.refused is not None
