"""`UncertaintyEvaluator`: a score of the text at hand, or the one a response carries."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.response.schema import Response
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms import MockLLM

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEvaluator
from semgrad_guard import Binding, Calibration, Policy, calibrate
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard.verdicts import binding_of

from .conftest import Heard, Maker, under

QUERY = "Where is Paris?"
LOOSE, STRICT = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1e308, on_cut="score")


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
    result = UncertaintyEvaluator(llm, LOOSE).evaluate_response(query=QUERY, response=moved)
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


def test_wrong_use_is_named(llm: SemGradLLM) -> None:
    with pytest.raises(InputError, match="a MockLLM scores nothing"):
        UncertaintyEvaluator(MockLLM(), LOOSE)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a policy"):
        UncertaintyEvaluator(llm, 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be given"):
        UncertaintyEvaluator(llm, LOOSE).evaluate(query=QUERY)
    assert "text_qa_template" in UncertaintyEvaluator(llm, LOOSE).get_prompts()


async def test_a_score_of_another_text_or_of_another_question_is_not_believed(
    make_engine: Maker, llm: SemGradLLM
) -> None:
    """Both are scored now, as if the response carried nothing."""
    guarded = under(make_engine, llm, LOOSE)
    evaluator = UncertaintyEvaluator(llm, LOOSE)

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
    loose = UncertaintyEvaluator(llm, LOOSE).evaluate_response(query=QUERY, response=response)
    assert (loose.passing, "within the threshold" in (loose.feedback or "")) == (True, True)
