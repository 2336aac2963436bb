"""`calibrate_engine`: the score of a question is that of its least certain call, and a guard keeps the promise."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.response.schema import Response
from llama_index.core.chat_engine import CondenseQuestionChatEngine, SimpleChatEngine
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine

from llama_index_semgrad_guard import (
    SemGradLLM,
    UncertaintyEvaluator,
    UncertaintyRouterCallback,
    acalibrate_engine,
    calibrate_engine,
    guarded,
)
from semgrad_guard import Binding, Calibration, LanguageModel, Policy, calibrate
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.guard.decision import binding_of

from .conftest import Heard, Maker, Passages, under
from .ways import WITHHELD, Scripted, reading, router_of, scripted, verdict_of

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


# The evaluator.

QUERY = "Where is Paris?"
LETS_THROUGH, STRICT = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1e308, on_cut="score")


def calibration(binding: Binding) -> Calibration:
    """Low scores are right, high ones are wrong."""
    scores = [i / 100 for i in range(200)]
    return calibrate(scores, [score < 1 for score in scores], alpha=0.3, delta=0.3, binding=binding)


async def test_a_text_is_scored_as_the_answer_to_its_query(llm: SemGradLLM) -> None:
    answer = llm.complete(QUERY)
    uncertainty = llm.score(QUERY, "Paris").uncertainty
    assert uncertainty is not None
    passing = UncertaintyEvaluator(llm, Policy(threshold=uncertainty * 1.001)).evaluate(query=QUERY, response="Paris")
    assert (passing.passing, passing.score, passing.invalid_result) == (True, None, False)
    failing = await UncertaintyEvaluator(llm, STRICT).aevaluate(query=QUERY, response=answer.text)
    assert failing.passing is False
    assert "above the threshold" in (failing.feedback or "")


def test_contexts_are_put_as_the_query_engine_puts_them(make_engine: Maker, llm: SemGradLLM, recorder: Heard) -> None:
    response = make_engine().query(QUERY)
    (start,) = [event for event in recorder.events if isinstance(event, LLMChatStartEvent)]
    expected = llm.score(start.messages, str(response)).uncertainty
    assert expected is not None
    assert expected != pytest.approx(llm.score(QUERY, str(response)).uncertainty)
    for policy, passing in ((Policy(threshold=expected * 1.001), True), (Policy(threshold=expected * 0.999), False)):
        assert UncertaintyEvaluator(llm, policy).evaluate_response(query=QUERY, response=response).passing is passing


def test_a_carried_score_is_not_computed_again(
    make_engine: Maker, llm: SemGradLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = under(make_engine, llm, STRICT).query(QUERY)
    moved = under(make_engine, llm, STRICT, escalate_to=lambda _: "elsewhere").query(QUERY)
    monkeypatch.delattr(SemGradLLM, "score")
    assert UncertaintyEvaluator(llm, STRICT).evaluate_response(query=QUERY, response=withheld).passing is False
    result = UncertaintyEvaluator(llm, LETS_THROUGH).evaluate_response(query=QUERY, response=moved)
    assert (result.passing, result.invalid_result) == (False, True)
    assert "outside any promise" in (result.invalid_reason or "")


def test_the_score_is_the_calibrated_confidence(llm: SemGradLLM) -> None:
    verdict = llm.score(QUERY, "Paris")
    policy = Policy.from_calibration(calibration(binding_of(verdict)))
    result = UncertaintyEvaluator(llm, policy).evaluate(query=QUERY, response="Paris")
    assert result.score == policy.confidence(verdict.uncertainty)
    assert result.score is not None
    other = Policy.from_calibration(calibration(binding_of(verdict).model_copy(update={"model": "another"})))
    with pytest.raises(BindingMismatchError):
        UncertaintyEvaluator(llm, other).evaluate(query=QUERY, response="Paris")


@pytest.mark.parametrize(("on_unscored", "passing"), [("abstain", False), ("answer", True), ("escalate", False)])
async def test_nothing_to_score_is_an_invalid_result(on_unscored: Any, passing: bool, llm: SemGradLLM) -> None:
    evaluator = UncertaintyEvaluator(llm, Policy(threshold=1e308, on_unscored=on_unscored, on_cut="score"))
    for result in (
        evaluator.evaluate(query=QUERY, response=" "),
        await evaluator.aevaluate_response(query=QUERY, response=Response("")),
    ):
        assert (result.passing, result.score, result.invalid_result) == (passing, None, True)


def test_wrong_use_of_the_evaluator_is_named(llm: SemGradLLM) -> None:
    with pytest.raises(InputError, match="a MockLLM scores nothing"):
        UncertaintyEvaluator(MockLLM(), LETS_THROUGH)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a policy"):
        UncertaintyEvaluator(llm, 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be given"):
        UncertaintyEvaluator(llm, LETS_THROUGH).evaluate(query=QUERY)
    assert "text_qa_template" in UncertaintyEvaluator(llm, LETS_THROUGH).get_prompts()


async def test_a_score_of_another_text_or_of_another_question_is_not_believed(
    make_engine: Maker, llm: SemGradLLM
) -> None:
    """Both are scored now, as if the response carried nothing."""
    guarded = under(make_engine, llm, LETS_THROUGH)
    evaluator = UncertaintyEvaluator(llm, LETS_THROUGH)

    def feedback_on(response: Any, query: str) -> str | None:
        """The feedback names the uncertainty."""
        return evaluator.evaluate_response(query=query, response=response).feedback

    def scored(response: Any, query: str) -> str | None:
        texts = [node.get_content() for node in response.source_nodes]
        return evaluator.evaluate(query=query, response=response.response, contexts=texts).feedback

    answered, edited, other = (guarded.query(QUERY) for _ in range(3))
    edited.response = "Paris is in Texas."  # type: ignore[union-attr]
    assert feedback_on(answered, QUERY) == feedback_on(answered, f"{QUERY} ")
    assert feedback_on(edited, QUERY) == scored(edited, QUERY) != feedback_on(answered, QUERY)
    assert feedback_on(other, "Who is Ann?") == scored(other, "Who is Ann?") != feedback_on(answered, QUERY)
    again = await evaluator.aevaluate_response(query="Who is Ann?", response=other)  # type: ignore[arg-type]
    assert again.feedback == scored(other, "Who is Ann?")
    moved = Response("Paris is in Texas.", metadata=answered.metadata)
    assert feedback_on(moved, QUERY) == scored(moved, QUERY) != feedback_on(answered, QUERY)


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
def test_each_policy_decides_for_itself(make_engine: Maker, llm: SemGradLLM, mode: Any) -> None:
    """Another guard has withheld the answer, or advised against it; the evaluator's policy may be another one."""
    response = under(make_engine, llm, STRICT, mode=mode).query(QUERY)
    strict = UncertaintyEvaluator(llm, STRICT).evaluate_response(query=QUERY, response=response)
    assert (strict.passing, "above the threshold" in (strict.feedback or "")) == (False, True)
    loose = UncertaintyEvaluator(llm, LETS_THROUGH).evaluate_response(query=QUERY, response=response)
    assert (loose.passing, "within the threshold" in (loose.feedback or "")) == (True, True)
