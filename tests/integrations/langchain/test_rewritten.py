"""A question that a model, or code, has written anew: the promise is about users' own questions."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, calibrate_chain, get_verdict
from langchain_semgrad_guard.runs import WITNESS
from semgrad_guard import Policy
from semgrad_guard.records import Verdict
from tests.pairwise import in_turn

QUESTIONS = [f"Who is number {number} of {number % 7}?" for number in range(40)]
RATES: dict[str, Any] = {"alpha": 0.2, "delta": 0.1, "progress": False, "grid": [1e9]}
Chain = Runnable[Any, Any]
ASK = ChatPromptTemplate.from_template("{question}")


@pytest.fixture(autouse=True)
def nothing_from_before() -> None:
    """Runs that other tests have left open, such as abandoned streams, are forgotten."""
    WITNESS._outermost.clear()
    WITNESS._of.clear()


def right(text: str, answers: Sequence[str]) -> bool:
    """A grader by function: everything is right."""
    return True


def writer() -> FakeListChatModel:
    return FakeListChatModel(responses=[QUESTIONS[5]])


def condensed(chat: Any) -> Chain:
    return ASK | writer() | StrOutputParser() | {"question": RunnablePassthrough()} | ASK | chat


def queried(chat: Any) -> Chain:
    """A model writes the query; the question stays the user's."""
    return RunnablePassthrough[Any].assign(found=ASK | writer()) | ASK | chat


def by_code(chat: Any) -> Chain:
    return (
        RunnableLambda[dict[str, str], dict[str, str]](lambda given: {"question": given["question"][4:]}) | ASK | chat
    )


def through_a_tool(chat: Any) -> Chain:
    """A function of one's own that calls another model first."""

    def answered(given: dict[str, str]) -> Any:
        return (ASK | chat).invoke({"question": writer().invoke(given["question"]).text})

    return RunnableLambda(answered)


def plain(chat: Any) -> Chain:
    return ASK | chat


def own_history(chat: Any) -> Chain:
    """The model's own earlier turn is one of the messages."""

    def answered(given: dict[str, str]) -> Any:
        first = chat.invoke(given["question"])
        return chat.invoke([HumanMessage(given["question"]), AIMessage(first.text), HumanMessage(given["question"])])

    return RunnableLambda(answered)


def last_of(chain: Chain, way: str) -> Verdict:
    given = {"question": QUESTIONS[3]}
    if way == "stream":
        message: Any = None
        for chunk in chain.stream(given):
            message = chunk if message is None else message + chunk
    else:
        message = chain.invoke(given) if way == "invoke" else asyncio.run(chain.ainvoke(given))
    verdict = get_verdict(message)
    assert verdict is not None
    return verdict


@pytest.fixture(scope="module")
def policy(request: Any) -> Policy:
    chat = ChatSemGrad.from_model(request.getfixturevalue("language_model"), max_tokens=12)
    return Policy.from_calibration(
        calibrate_chain(plain(chat), [({"question": q}, "x") for q in QUESTIONS], right, **RATES)
    )


@in_turn(make=[condensed, queried, by_code, through_a_tool, plain, own_history], way=["invoke", "ainvoke", "stream"])
def test_what_came_before(chat: ChatSemGrad, policy: Policy, make: Callable[[Any], Chain], way: str) -> None:
    verdict = last_of(make(GuardedChatModel(chat, policy)), way)
    rewritten = make not in (plain, own_history)
    assert any("may not be what the user asked" in reason for reason in verdict.unfamiliar) is rewritten
    if make is plain:
        assert verdict.promised
    assert not WITNESS._outermost, "nothing is kept"
    assert not WITNESS._of


@pytest.mark.parametrize("make", [condensed, by_code])
def test_the_whole_that_was_calibrated_is_familiar(chat: ChatSemGrad, make: Callable[[Any], Chain]) -> None:
    examples = [({"question": q}, "x") for q in QUESTIONS]
    policy = Policy.from_calibration(calibrate_chain(make(chat), examples, right, max_concurrency=4, **RATES))
    assert last_of(make(GuardedChatModel(chat, policy)), "invoke").promised


@pytest.mark.parametrize("inline", [False, True])
async def test_the_start_of_a_text_model_is_told_to_everybody(chat: ChatSemGrad, policy: Policy, inline: bool) -> None:
    """LangChain tells it to inline handlers alone, if there is one; which the witness must not be, nor rely on."""
    events: list[str] = []

    class Listener(AsyncCallbackHandler):
        run_inline = inline

        async def on_llm_start(self, *args: Any, **known: Any) -> None:
            events.append("start")

    condenser = FakeListLLM(responses=[QUESTIONS[5]])
    chain = ASK | condenser | {"question": RunnablePassthrough()} | ASK | GuardedChatModel(chat, policy)
    verdict = get_verdict(await chain.ainvoke({"question": QUESTIONS[3]}, {"callbacks": [Listener()]}))
    assert events == ["start", "start"], "of the text model, and of the chat model"
    assert verdict is not None
    assert not verdict.promised
    assert not WITNESS._outermost


def test_a_failed_chain_leaves_nothing_behind(chat: ChatSemGrad) -> None:
    def fails(_: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        (writer() | RunnableLambda(fails) | chat).invoke("hello")
    assert not WITNESS._outermost
    assert copy.deepcopy(WITNESS) is pickle.loads(pickle.dumps(WITNESS)) is WITNESS  # noqa: S301
