"""A calibration by sentence: bound to its form, recorded, refused by a guard of whole answers; and its gates."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.calibration import AnswerSentences, Binding, Calibration, calibrate_sentences, gates, sentence_gates
from semgrad_guard.calibration.calibrating import recalibrate
from semgrad_guard.calibration.calibration_record import report
from semgrad_guard.calibration.sentence_gates import Promise, compared_scores, sentence_key
from semgrad_guard.errors import BindingMismatchError, CalibrationError
from semgrad_guard.records import SentenceVerdict, Verdict
from semgrad_guard.settings import OnDoubt

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import check_sentences

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


def test_the_two_promises_are_told_apart() -> None:
    one, whole = (calibrate_sentences(answers(), on_doubt="drop", promise=p, **RATES) for p in ("sentence", "answer"))
    words = report(one)
    assert words["promise"].startswith("Take an answer from which something is delivered, and one of its delivered")
    assert "sentences, " in words["effect"]
    assert report(whole)["promise"].startswith(
        "Of the answers from which something is delivered, at most 20% hold a wrong"
    )
    assert (whole.threshold or 0.0) < (one.threshold or 0.0)
    assert (one.is_about_answers, whole.is_about_answers) == (False, True)
    with pytest.raises(CalibrationError, match="is about sentences, and the log keeps no score of these"):
        recalibrate(one, [0.1], [(0.1, True)])


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
    assert "of the scored sentences wrong and an AUROC of" in reason
    assert "30 answers with labels find a threshold in" in reason
    right = [AnswerSentences(f"q{i}", "a", [0.1], [True], [None]) for i in range(5)]
    assert "If all stay right" in (calibrate_sentences(right, on_doubt="drop", alpha=0.05, delta=0.1).reason or "")


# The walk: against a plain loop, and by simulation for each form of `on_doubt`.


ALPHA, DELTA = 0.3, 0.2
SENTENCE = st.tuples(st.integers(0, 9).map(float), st.booleans(), st.integers(0, 10**6).map(float))


@pytest.mark.parametrize(
    ("on_doubt", "scores", "leans_on", "expected"),
    [
        ("stop", [1.0, 3.0, 0.5, math.nan, 2.0], [None, None, 1, None, None], [1.0, 3.0, 3.0, None, None]),
        ("drop", [1.0, 3.0, 0.5, math.nan, 2.0], [None, None, 1, None, None], [1.0, 3.0, 3.0, None, 2.0]),
        ("drop", [2.0, 1.0, 0.5], [None, 0, 1], [2.0, 2.0, 2.0]),  # through a chain
        ("drop", [None, 1.0, 0.5], [None, 0, None], [None, None, 0.5]),
        ("drop", [2.0, 1.0, 0.5], [None, None, 0], [2.0, 1.0, 2.0]),
    ],
)
def test_a_sentence_counts_with_all_that_it_depends_on(
    on_doubt: OnDoubt, scores: list[float | None], leans_on: list[int | None], expected: list[float | None]
) -> None:
    assert compared_scores(scores, leans_on, on_doubt=on_doubt) == expected


@pytest.mark.parametrize("on_doubt", ["drop", "stop"])
def test_the_simulation_compares_the_same_scores(on_doubt: OnDoubt) -> None:
    rng = np.random.default_rng(2)
    scores, leans = rng.normal(size=(20, 8)), rng.random((20, 8)) < 0.4
    one_by_one = [
        compared_scores(s, [n - 1 if n and one else None for n, one in enumerate(b)], on_doubt=on_doubt)
        for s, b in zip(scores.tolist(), leans.tolist(), strict=True)
    ]
    assert check_sentences.compared(scores, leans, on_doubt).tolist() == one_by_one


def padded(answers: list[list[tuple[float, bool, float]]]) -> list[np.ndarray]:
    """Scores, errors and keys as arrays, with an infinite score where there is no sentence."""
    empty = (math.inf, False, 0.0)
    width = max(map(len, answers))
    rows = [[*answer, *[empty] * (width - len(answer))] for answer in answers]
    return [np.array([[sentence[i] for sentence in row] for row in rows]) for i in range(3)]


@pytest.mark.parametrize("promise", get_args(Promise))
@given(answers=st.lists(st.lists(SENTENCE, min_size=1, max_size=4, unique_by=lambda s: s[2]), min_size=1, max_size=60))
def test_a_walk_equals_the_plain_loop(promise: Promise, answers: list[list[tuple[float, bool, float]]]) -> None:
    scores, wrong, keys = padded(answers)
    walk = sentence_gates.walk_sentences(scores, wrong, keys, promise=promise, alpha=ALPHA, delta=DELTA)
    surest = sorted(min(score for score, _, _ in answer) for answer in answers)
    threshold, counts = None, (0, 0)
    first = gates.first_count(len(answers), alpha=ALPHA, delta=DELTA, start=sentence_gates.START[promise])
    for count in gates.gate_counts(len(answers), alpha=ALPHA, level=DELTA, first=first).tolist():
        at = surest[count - 1]
        delivered = [kept for answer in answers if (kept := [s for s in answer if s[0] <= at])]
        if promise == "answer":
            errors = sum(any(is_wrong for _, is_wrong, _ in kept) for kept in delivered)
        else:
            errors = sum(min(kept, key=lambda s: s[2])[1] for kept in delivered)
        if gates.p_values(errors, len(delivered), alpha=ALPHA) > DELTA:
            break
        threshold, counts = at, (len(delivered), errors)
    assert (walk.threshold is None) == (threshold is None)
    if walk.threshold is not None and threshold is not None:
        assert [walk.threshold] == gates.between(np.array([threshold]), scores)
        assert (walk.answered, walk.wrong) == counts


def test_the_two_promises_differ_where_an_answer_holds_right_and_wrong_sentences() -> None:
    """One of four delivered sentences is wrong in every answer."""
    scores = np.tile(np.arange(4.0), (200, 1))
    wrong = np.tile(np.arange(4) == 3, (200, 1))
    keys = np.random.default_rng(3).random(scores.shape)
    counts = {
        promise: sentence_gates.wrong_answers(scores, wrong, keys, np.array([2.0, 3.0]), promise=promise).tolist()
        for promise in get_args(Promise)
    }
    assert counts["answer"] == [0, 200]
    assert counts["sentence"][0] == 0
    assert 30 < counts["sentence"][1] < 70


def test_an_answer_without_a_score_is_never_counted() -> None:
    scores = np.full((30, 2), np.inf)
    walk = sentence_gates.walk_sentences(
        scores, np.ones((30, 2), bool), np.zeros((30, 2)), promise="sentence", alpha=0.1, delta=0.1
    )
    assert (walk.threshold, walk.answered) == (None, 0)


def test_keys_follow_the_texts_and_are_uniform() -> None:
    keys = [sentence_key("Who?", f"answer {i}", 0) for i in range(2000)]
    assert keys == [sentence_key("Who?", f"answer {i}", 0) for i in range(2000)]
    assert len({*keys, sentence_key("Who?", "answer 0", 1), sentence_key("Why?", "answer 0", 0)}) == 2002
    assert abs(np.mean(keys) - 0.5) < 0.03
    assert 0 <= min(keys) < 0.01 < 0.99 < max(keys) < 1


@pytest.mark.parametrize("on_doubt", check_sentences.FORMS)
@pytest.mark.parametrize("design", check_sentences.DESIGNS, ids=lambda d: f"{d.kind}-{d.correlation}-{d.leaning}")
def test_both_promises_hold_in_simulation(design: check_sentences.Design, on_doubt: OnDoubt) -> None:
    """400 calibrations of 100 answers: three standard errors above delta are .145."""
    cells = check_sentences.simulated(design, on_doubt, 100, 400, answers=20_000)
    print(*((cell.promise, cell.coverage, cell.violated) for cell in cells))
    assert all(cell.violated <= 0.145 for cell in cells)
    assert all(cell.coverage >= cell.floor - 0.03 for cell in cells)
