"""What looks like a thought in a text from elsewhere is never scored as the answer, by any reader."""

from __future__ import annotations

import re

import pytest

from semgrad_guard import HybridGrad, LanguageModel, Policy, Verdict
from semgrad_guard.guard import Answerer
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.scoring import TextScorer
from tests.thinking import thinking_model
from tests.thoughts import SHORT, WRITTEN, Written

QUESTION = "What is the capital of France?"
by_text = pytest.mark.parametrize("one", SHORT, ids=lambda one: one.name)


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


def checked(one: Written, verdict: Verdict, *, is_scored: bool | None) -> None:
    assert verdict.text == one.answer
    assert (verdict.reasoning or "") == (one.thought or "")
    if is_scored is not None:
        assert verdict.status == ("scored" if is_scored else "unscored")
    assert verdict.status == "scored" or "reasoning" in (verdict.reason or "")


@by_text
def test_a_scorer_whose_template_names_no_marks(one: Written, pocket: LanguageModel) -> None:
    draft = Answerer(pocket, HybridGrad(), served=True).scored(QUESTION, one.text)
    checked(one, draft.verdict, is_scored=one.thought is None)


@by_text
def test_a_scorer_that_thinks_in_marks_of_its_own(one: Written) -> None:
    """It scores the answer given the thought, as it writes thoughts itself."""
    answerer = Answerer(thinking_model(), HybridGrad(), served=True)
    verdict = answerer.scored(QUESTION, one.text).verdict
    checked(one, verdict, is_scored=one.scored)
    if one.scored and one.thought and "</think>" not in one.text:
        own = answerer.scored(QUESTION, f"<think>\n{one.thought}\n</think>\n\n{one.answer}").verdict
        assert verdict.uncertainty == own.uncertainty


@by_text
def test_a_file_of_finished_answers(one: Written, pocket: LanguageModel) -> None:
    row = Question(id="a", question=QUESTION, answers=("Lyon",), response=one.text)
    (scored,) = TextScorer(pocket, HybridGrad(), Policy(threshold=1e308))([row])
    assert scored.verdict is not None
    assert (scored.verdict.status == "scored") == (one.thought is None)
    assert "Paris" not in scored.verdict.text or one.thought in (None, "")


@pytest.mark.parametrize("by_sentence", [None, "drop"])
def test_reported_log_probabilities(by_sentence: str | None) -> None:
    """The answer is the whole text there, and has no score; nor has anything that may be a thought."""
    scorer = ReportedScorer("m", by_sentence=by_sentence)  # type: ignore[arg-type]
    for one in WRITTEN:
        entries = [{"token": word, "logprob": -0.1, "top_logprobs": []} for word in re.findall(r"\s*\S+", one.text)]
        verdict = scorer.verdict(one.text, entries, options={})
        is_answer = one.thought is None and one.answer == one.text
        assert verdict.status == ("scored" if is_answer else "unscored"), one
        if not is_answer:
            assert "reasoning" in (verdict.reason or ""), one
            assert all(part.uncertainty is None for part in verdict.sentences if one.thought or not one.answer), one
