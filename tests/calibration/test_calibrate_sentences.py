"""A calibration by sentence: bound to its form, recorded, and refused by a guard of whole answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semgrad_guard.calibration import AnswerSentences, Binding, Calibration, calibrate_sentences
from semgrad_guard.calibration.calibrating import recalibrate
from semgrad_guard.calibration.promise import report
from semgrad_guard.errors import BindingMismatchError, CalibrationError
from semgrad_guard.records import SentenceVerdict, Verdict

BINDING = Binding(settings={}, model="m", estimator="hybridgrad", fingerprint="f", prompt_template="t")
RATES: dict[str, Any] = {"alpha": 0.2, "delta": 0.1}


def answers(n: int = 100, *, seed: int = 1) -> list[AnswerSentences]:
    """Three sentences each, the last of which leans on the second; wrong ones are less certain."""
    rng = np.random.default_rng(seed)
    found: list[AnswerSentences] = []
    for number in range(n):
        wrong = rng.random(3) < 0.3
        scores = (rng.random(3) + wrong).tolist()
        found.append(AnswerSentences(f"q{number}", f"a{number}", scores, (~wrong).tolist(), [None, None, 1]))
    return found


def test_counts_are_of_what_the_form_delivers(tmp_path: Path) -> None:
    rows = answers()
    found = {form: calibrate_sentences(rows, on_doubt=form, **RATES) for form in ("drop", "stop")}
    for form, calibration in found.items():
        limit, record = calibration.threshold, calibration.sentences
        assert limit is not None
        assert record is not None
        delivered = [
            (right, answer.question)
            for answer in rows
            for place, right in enumerate(answer.correct)
            if {
                "drop": max(answer.uncertainties[1:]) if place == 2 else answer.uncertainties[place],
                "stop": max(answer.uncertainties[: place + 1]),
            }[form]
            <= limit
        ]
        assert (record.n, record.delivered) == (300, len(delivered))
        assert record.delivered_wrong == sum(not right for right, _ in delivered)
        assert record.wrong == sum(not right for answer in rows for right in answer.correct)
        assert calibration.n_answered == len({question for _, question in delivered})
        assert Calibration.load(calibration.save(tmp_path / f"{form}.json")) == calibration
    assert found["drop"].sentences != found["stop"].sentences


def test_the_two_promises_never_share_a_sentence_of_the_report() -> None:
    texts = {
        promise: report(calibrate_sentences(answers(), on_doubt="drop", promise=promise, **RATES))["promise"]
        for promise in ("sentence", "answer")
    }
    assert texts["sentence"].startswith("Take an answer from which something is delivered, and one of its delivered")
    assert texts["answer"].startswith("Of the answers from which something is delivered, at most 20% hold a wrong")
    assert "sentences, " in report(calibrate_sentences(answers(), on_doubt="drop", **RATES))["effect"]


def test_the_promise_about_answers_delivers_less() -> None:
    one, whole = (calibrate_sentences(answers(), on_doubt="drop", promise=p, **RATES) for p in ("sentence", "answer"))
    assert (whole.threshold or 0.0) < (one.threshold or 0.0)


@pytest.mark.parametrize(
    "other", [BINDING, BINDING.model_copy(update={"settings": {"by": "sentence", "on_doubt": "stop"}})]
)
def test_a_calibration_is_refused_in_another_form(other: Binding) -> None:
    bound = calibrate_sentences(answers(), on_doubt="drop", binding=BINDING, **RATES).binding
    assert bound is not None
    bound.require(bound)
    with pytest.raises(BindingMismatchError, match="'on_doubt': 'drop'} at calibration"):
        bound.require(other)
    with pytest.raises(BindingMismatchError, match="not set at calibration"):
        BINDING.require(bound)


def test_p_correct_is_that_of_one_sentence() -> None:
    """Half of each answer is wrong, so that no answer is right; the scores tell the sentences apart."""
    rows = [AnswerSentences(f"q{i}", "a", [i / 100, 5 + i / 100], [True, False], [None, None]) for i in range(60)]
    found = calibrate_sentences(rows, on_doubt="drop", **RATES)
    assert (found.confidence(0.1) or 0.0) > 0.9
    assert (found.confidence(5.5) or 1.0) < 0.1


def test_an_answer_without_sentences_is_unscored_and_wrong() -> None:
    found = calibrate_sentences([*answers(), AnswerSentences("empty", "", [], [], [])], on_doubt="drop", **RATES)
    assert (found.n, found.n_unscored) == (101, 1)
    assert found.n_wrong == 1 + sum(not all(answer.correct) for answer in answers())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_doubt": "retry"}, "on_doubt is .*, and promise is"),
        ({"promise": "pooled"}, "on_doubt is .*, and promise is"),
        ({"by_hand": 3}, "no `by_hand`"),
    ],
)
def test_what_is_not_a_form_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate_sentences(answers(), **{"on_doubt": "drop", **RATES, **change})
    with pytest.raises(CalibrationError, match="leans_on"):
        calibrate_sentences([AnswerSentences("q", "a", [0.1], [True], [])], on_doubt="drop", **RATES)


def test_grades_of_whole_answers_tell_only_about_a_promise_about_answers() -> None:
    found = calibrate_sentences(answers(), on_doubt="drop", **RATES)
    assert not found.is_about_answers
    assert calibrate_sentences(answers(), on_doubt="drop", promise="answer", **RATES).is_about_answers
    with pytest.raises(CalibrationError, match="is about sentences, and the log keeps no score of these"):
        recalibrate(found, [0.1], [(0.1, True)])


def observed(number: int, *scores: float, end: int = 4) -> Verdict:
    """A verdict on a draft of sentences of four characters."""
    sentences = tuple(
        SentenceVerdict(start=4 * i, end=4 * i + end, uncertainty=score, leans_on=i - 1 if i == 2 else None, tokens=1)
        for i, score in enumerate(scores)
    )
    return Verdict.of(
        status="scored", action="answer", text="One. " * len(scores), estimator="hybridgrad", model="m",
        uncertainty=max(scores), sentences=sentences, prompt=str(number),
        settings={"by": "sentence", "on_doubt": "drop"},
    )  # fmt: skip


def test_verdicts_of_a_guard_that_observes_are_calibrated_and_bound_as_they_are() -> None:
    verdicts = [observed(i, i / 1000, 1 + i / 1000, 0.5) for i in range(40)]
    rows = [AnswerSentences.of(v, [True, False, False], question=str(v.details.prompt)) for v in verdicts]
    binding = Binding(model="m", estimator="hybridgrad", settings=verdicts[0].details.settings)
    found = calibrate_sentences(rows, on_doubt="drop", binding=binding, **RATES)
    assert found.binding == binding
    assert found.threshold == pytest.approx(math.sqrt(0.039))  # half-way to the next sentence, at 1
    assert found.sentences is not None
    assert (found.sentences.delivered, found.sentences.delivered_wrong) == (40, 0)


@pytest.mark.parametrize(("end", "grades"), [(4, [True]), (0, [True, True])])
def test_verdicts_without_their_sentences_or_grades_are_refused(end: int, grades: list[bool]) -> None:
    with pytest.raises(CalibrationError, match=r"2 sentences and 1 grades|does not hold all sentences"):
        AnswerSentences.of(observed(1, 0.1, 0.2, end=end), grades, question="q")


def test_the_advice_is_about_sentences() -> None:
    reason = calibrate_sentences(answers(30), on_doubt="drop", alpha=0.05, delta=0.1).reason
    assert reason is not None
    assert "of the sentences wrong and an AUROC of" in reason
    assert "30 answers with labels find a threshold in" in reason
    right = [AnswerSentences(f"q{i}", "a", [0.1], [True], [None]) for i in range(5)]
    assert "If all stay right" in (calibrate_sentences(right, on_doubt="drop", alpha=0.05, delta=0.1).reason or "")
