"""`calibrate_chain`: real chains, real records, and a promise that holds end to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableWithMessageHistory
from langgraph.checkpoint.memory import InMemorySaver

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyRouterCallback,
    acalibrate_chain,
    calibrate_chain,
    guarded,
)
from semgrad_guard import Calibration, Policy
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError

from .scripted import CANARY, SURE, Scripted
from .support import verdict_of

EXAMPLES: list[Any] = [(f"q{number}", [SURE]) for number in range(60)]
HOW: dict[str, Any] = {"alpha": 0.2, "delta": 0.2, "progress": False}


def script(messages: Any) -> str:
    """Wrong and doubtful for every third question."""
    number = int(messages[-1].text.split()[-1][1:])
    return f"It is {CANARY if number % 3 == 0 else SURE}, q{number}"


def model(router: Any = None, **fields: Any) -> GuardedChatModel:
    return GuardedChatModel(Scripted(script=script, **fields), router)


def twice(own: Any) -> Any:
    return own | StrOutputParser() | own


@pytest.mark.parametrize("at_once", [1, 12])
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_are_promised(at_once: int, is_async: bool) -> None:
    how = {**HOW, "max_concurrency": at_once}
    chain = model() | StrOutputParser()
    if is_async:
        calibration = asyncio.run(acalibrate_chain(chain, EXAMPLES, "contains", **how))
    else:
        calibration = calibrate_chain(chain, EXAMPLES, "contains", **how)
    assert (calibration.n, calibration.n_wrong) == (60, 20)
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), abstain_message="WITHHELD")
    verdict = verdict_of(model(router).invoke("q1"))
    assert (verdict.action, verdict.promised) == ("answer", True)
    assert model(router).invoke("q3").text == "WITHHELD"
    within = guarded(model(router), router).invoke("q1")
    assert verdict_of(within).promised


def test_whole_questions_are_promised() -> None:
    calibrations = [
        calibrate_chain(twice(model()), EXAMPLES, "contains", **HOW, max_concurrency=at_once) for at_once in (1, 12)
    ]
    assert len({(one.threshold, one.n_wrong) for one in calibrations}) == 1
    router = UncertaintyRouterCallback(Policy.from_calibration(calibrations[0]), abstain_message="WITHHELD")
    chain = guarded(twice(model(router)), router)
    verdict = verdict_of(chain.invoke("q1"))
    assert (verdict.action, verdict.promised) == ("answer", True)
    assert chain.invoke("q3").text == "WITHHELD"
    again = calibrate_chain(chain, EXAMPLES, "contains", **HOW)
    assert again.threshold == calibrations[0].threshold
    with pytest.raises(BindingMismatchError, match="whole questions"):
        model(router).invoke("q1")


def test_helpers_do_not_count() -> None:
    helper = GuardedChatModel(Scripted(script=lambda messages: messages[-1].text), False)
    plain = calibrate_chain(model(), EXAMPLES, "contains", **HOW)
    helped = calibrate_chain(helper | StrOutputParser() | model(), EXAMPLES, "contains", **HOW)
    assert (helped.threshold, helped.binding) == (plain.threshold, plain.binding)


@pytest.mark.parametrize("at_once", [1, 12])
def test_each_example_has_a_conversation_of_its_own(at_once: int) -> None:
    inner = Scripted(script=script)
    agent = create_agent(GuardedChatModel(inner), [], checkpointer=InMemorySaver())
    examples: list[Any] = [({"messages": [("human", text)]}, answers) for text, answers in EXAMPLES]
    config: Any = {"configurable": {"thread_id": "shared"}}
    calibrate_chain(agent, examples, "contains", **HOW, config=config, max_concurrency=at_once)
    assert {len(texts) for texts, _ in inner.requests} == {1}
    inner.requests.clear()
    histories: dict[str, InMemoryChatMessageHistory] = {}
    talk = RunnableWithMessageHistory(
        GuardedChatModel(inner), lambda session_id: histories.setdefault(session_id, InMemoryChatMessageHistory())
    )
    pairs: list[Any] = [([HumanMessage(text)], answers) for text, answers in EXAMPLES]
    calibrate_chain(talk, pairs, "contains", **HOW, max_concurrency=at_once)
    assert {len(texts) for texts, _ in inner.requests} == {1}
    assert len(histories) == len(EXAMPLES)


def test_a_record_is_continued(tmp_path: Path) -> None:
    record = tmp_path / "answers.jsonl"
    inner = Scripted(script=script)
    first = calibrate_chain(GuardedChatModel(inner), EXAMPLES, "contains", **HOW, record=record, name="bot 1")
    before = len(inner.requests)
    again = calibrate_chain(GuardedChatModel(inner), EXAMPLES, "contains", **HOW, record=record, name="bot 1")
    assert len(inner.requests) == before
    assert first.n == again.n
    with pytest.raises(BindingMismatchError, match="bot 1"):
        calibrate_chain(GuardedChatModel(inner), EXAMPLES, "contains", **HOW, record=record, name="bot 2")
    with pytest.raises(InputError, match="name"):
        calibrate_chain(GuardedChatModel(inner), EXAMPLES, "contains", **HOW, record=tmp_path / "other.jsonl")


def test_mistakes() -> None:
    with pytest.raises(CalibrationError, match="no score"):
        calibrate_chain(model(logprobs=None), EXAMPLES, "contains", **HOW)
    with pytest.raises(CalibrationError, match="No example made a scored call"):
        calibrate_chain(RunnableLambda(lambda text: "x"), EXAMPLES, "contains", **HOW)
    with pytest.raises(InputError, match="gives True, False or"):
        calibrate_chain(model(), EXAMPLES, lambda text, answers: "no", **HOW)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="Every graded answer is an abstention"):
        calibrate_chain(model(), EXAMPLES, lambda text, answers: "abstained", **HOW)
    for wrong in ({"chain": None}, {"chain": 5}, {"output": 5}, {"config": 5}):
        given: Any = {"chain": lambda _: "a", **wrong}
        with pytest.raises(InputError, match=r"a chain is|output a function"):
            calibrate_chain(given.pop("chain"), [("a?", ["a"])], "exact-match", alpha=0.2, delta=0.2, **given)
    for option in ("record", "labels", "progress", "upstream"):
        with pytest.raises(InputError, match=f"^{option} "):
            calibrate_chain(model(), EXAMPLES, "contains", **{**HOW, option: 5})
    with pytest.raises(InputError, match="output of a chain must be a text"):
        calibrate_chain(model(), EXAMPLES, "contains", **HOW, output=lambda _: 5)
    with pytest.raises(InputError, match="is no estimator"):
        GuardedChatModel(Scripted(), estimator="")
    with pytest.raises(InputError, match="pass output="):
        calibrate_chain(model() | (lambda _: 3), EXAMPLES, "contains", **HOW)
    found = calibrate_chain(
        model() | (lambda message: [message.text]), EXAMPLES, "contains", **HOW, output=lambda x: x[0]
    )
    assert found.n == 60


@pytest.mark.parametrize("estimator", [None, "max_probability", "auto"])
def test_the_embedded_model(estimator: Any, tmp_path: Path) -> None:
    prompt = ChatPromptTemplate.from_template("What is the capital of {land}?")
    lands = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Mongolia": "Ulaanbaatar"}
    examples: list[Any] = [({"land": land}, [city]) for land, city in lands.items()] * 8
    how = {**HOW, "alpha": 0.3, "copies": "keep"}
    chain = prompt | ChatSemGrad(model="pocket")
    calibration = calibrate_chain(chain, examples, "contains", **how, estimator=estimator, max_concurrency=8)
    calibration.save(tmp_path / "calibration.json")
    policy = Policy.from_calibration(Calibration.load(tmp_path / "calibration.json"))
    verdict = verdict_of((prompt | ChatSemGrad(router=UncertaintyRouterCallback(policy))).invoke({"land": "France"}))
    assert (verdict.action, verdict.promised) == ("answer", calibration.threshold is not None)
