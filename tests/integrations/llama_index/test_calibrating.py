"""`calibrate_engine`: the score of a question is that of its least certain call, and a guard keeps the promise."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.chat_engine import CondenseQuestionChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine

from llama_index_semgrad_guard import (
    SemGradLLM,
    UncertaintyRouterCallback,
    acalibrate_engine,
    calibrate_engine,
    guarded,
)
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError

from .conftest import Passages
from .scripted import WITHHELD, Scripted, router_of, scripted, verdict_of
from .ways import reading

LOOSE: dict[str, Any] = {"alpha": 0.15, "delta": 0.3, "progress": False}
EXAMPLES = [(f"Question {number}?", ["right"] if number % 5 else ["another"]) for number in range(60)]


def scored(prompt: str) -> tuple[str, float]:
    """Surer where it is right; each question has a number of its own."""
    number = int(prompt.split("Question ")[1].split("?")[0])
    return "right", random.Random(number).random() + (0 if number % 5 else 1)


def numbered(model: LanguageModel, router: Any = None) -> Scripted:
    return scripted(model, scored, router=router_of() if router is None else router)


def refining(llm: Any, **options: Any) -> Any:
    """An engine of two calls a question."""
    return RetrieverQueryEngine.from_args(
        Passages("a fact", "another fact"), llm=llm, response_mode="accumulate", **options
    )


def policy_of(calibration: Calibration) -> UncertaintyRouterCallback:
    return UncertaintyRouterCallback(Policy.from_calibration(calibration), abstain_message=WITHHELD)


def delivered(engine: Any) -> list[tuple[str, bool]]:
    responses = [engine.query(question) for question, _ in EXAMPLES]
    return [(str(one), verdict_of(one).promised) for one in responses]


def test_a_question_of_one_call_is_promised_with_a_guard_around_it_and_without(wide: LanguageModel) -> None:
    calibration = calibrate_engine(reading(numbered(wide)), EXAMPLES, "contains", **LOOSE)
    assert calibration.threshold is not None
    llm = numbered(wide, router=policy_of(calibration))
    around, alone = delivered(guarded(reading(llm), llm.router)), [reading(llm).query(q) for q, _ in EXAMPLES]
    assert [text for text, _ in around] == [str(one) for one in alone]
    assert ("right", True) in around
    assert (WITHHELD, False) in around
    assert {promised for text, promised in around if text == "right"} == {True}


def test_a_question_of_several_calls_is_calibrated_as_a_whole(wide: LanguageModel) -> None:
    calls: list[str] = []

    def script(prompt: str) -> tuple[str, float]:
        calls.append(prompt)
        text, score = scored(prompt)
        return text, score if "another fact" in prompt else score / 2

    llm = scripted(wide, script)
    calibration = calibrate_engine(refining(llm), EXAMPLES, "contains", **LOOSE)
    assert len(calls) == 2 * len(EXAMPLES)
    whole = sorted(scored(question)[1] for question, _ in EXAMPLES)
    assert sorted(calibration.scores) == pytest.approx(whole)
    assert (calibration.binding.settings or {})["unit"] == "question"
    llm.router = policy_of(calibration)
    found = delivered(guarded(refining(llm), llm.router))
    due = [score <= (calibration.threshold or 0) for score in (scored(question)[1] for question, _ in EXAMPLES)]
    assert [text != WITHHELD for text, _ in found] == due
    assert [promised for _, promised in found] == due
    with pytest.raises(BindingMismatchError, match="about whole questions"):
        llm.complete("Question 1?")


def test_a_calibration_of_answers_promises_a_models_own_text_alone(wide: LanguageModel) -> None:
    """Not what several calls, or code behind one, have made."""
    calibration = calibrate_engine(reading(numbered(wide)), EXAMPLES, "contains", **LOOSE)
    llm = numbered(wide, router=policy_of(calibration))

    class Shouting(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return str(reading(llm).query(query_str)).upper()

    sure = next(q for q, _ in EXAMPLES if scored(q)[1] <= (calibration.threshold or 0))
    for engine, promised in ((reading(llm), True), (Shouting(), False), (refining(llm), False)):
        response = guarded(engine, llm.router).query(sure)
        assert "right" in str(response).lower()
        assert verdict_of(response).promised is promised


async def test_runs_at_once_give_the_same_calibration(wide: LanguageModel) -> None:
    """One after the other, in threads and on the event loop; of a guarded engine and of its inside."""
    llm = numbered(wide)
    one = calibrate_engine(refining(llm), EXAMPLES, "contains", **LOOSE)
    others = [
        calibrate_engine(refining(llm), EXAMPLES, "contains", max_concurrency=8, **LOOSE),
        await acalibrate_engine(refining(llm), EXAMPLES, "contains", max_concurrency=8, **LOOSE),
        calibrate_engine(guarded(refining(llm), llm.router), EXAMPLES, "contains", **LOOSE),
        calibrate_engine(lambda question: str(refining(llm).query(question)), EXAMPLES, "contains", **LOOSE),
    ]
    assert [(two.threshold, sorted(two.scores)) for two in others] == [(one.threshold, sorted(one.scores))] * 4


@pytest.mark.parametrize("kind", ["chat", "guarded chat", "agent"])
def test_each_example_has_a_conversation_of_its_own(kind: str, wide: LanguageModel) -> None:
    prompts: list[str] = []

    def script(prompt: str) -> tuple[str, float]:
        prompts.append(prompt)
        return "Thought: I know.\nAnswer: right", 0.01

    llm = scripted(wide, script)
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine: Any = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    if kind == "guarded chat":
        engine = guarded(engine, llm.router)
    if kind == "agent":
        engine = ReActAgent(llm=llm, tools=[])
    conversation = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    examples = [*EXAMPLES[:6], ([*conversation, {"role": "user", "content": "Question 7?"}], ["right"])]
    calibrate_engine(engine, examples, "contains", max_concurrency=3, **LOOSE)
    assert sorted(prompt.count("Question ") for prompt in prompts) == [1] * 7
    assert memory.get_all() == []


def test_helpers_and_unguarded_strangers_do_not_count(wide: LanguageModel) -> None:
    helper = scripted(wide, lambda _: ("Question 3?", 0.9), router=False)
    llm = numbered(wide)
    engine = CondenseQuestionChatEngine.from_defaults(reading(llm), llm=helper)
    examples = [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": q}], r)
        for q, r in EXAMPLES
    ]
    calibration = calibrate_engine(engine, examples, "contains", **LOOSE)
    assert set(calibration.scores) == {scored("Question 3?")[1]}


def test_an_example_without_a_call_has_no_score(wide: LanguageModel) -> None:
    llm = numbered(wide)

    class Sometimes(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return "Empty Response" if query_str == "Question 2?" else str(llm.complete(query_str))

    assert calibrate_engine(Sometimes(), EXAMPLES, "contains", **LOOSE).n_unscored == 1
    with pytest.raises(CalibrationError, match="No example made a scored call"):
        calibrate_engine(lambda _question: "right", EXAMPLES, "contains", **LOOSE)


def test_other_estimators_of_a_question(llm: SemGradLLM) -> None:
    """Each has the score of its own least certain call; a learned one needs single answers."""
    examples = [(f"Where is {place}?", ["a"]) for place in ("Rome", "Oslo", "Bern")]
    engine = RetrieverQueryEngine.from_args(Passages("Rome.", "Oslo."), llm=llm, response_mode="accumulate")
    own = calibrate_engine(engine, examples, "contains", **LOOSE)
    other = calibrate_engine(engine, examples, "contains", estimator="max_probability", **LOOSE)
    assert (other.binding.estimator, own.binding.estimator) == ("max_probability", "hybridgrad")
    assert set(own.scores).isdisjoint(other.scores)
    with pytest.raises(CalibrationError, match="several answers each"):
        calibrate_engine(engine, examples, "contains", estimator="states", **LOOSE)


def test_wrong_use_is_named(wide: LanguageModel) -> None:
    with pytest.raises(InputError, match="a int is no engine"):
        calibrate_engine(3, EXAMPLES, "contains", **LOOSE)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="asked a text"):
        calibrate_engine(reading(numbered(wide)), [(["x"], ["y"])], "contains", **LOOSE)
    unscored = scripted(wide, lambda _: ("right", None))
    with pytest.raises(CalibrationError, match="no score to calibrate"):
        calibrate_engine(reading(unscored), EXAMPLES[:2], "contains", **LOOSE)
