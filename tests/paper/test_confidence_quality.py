"""Expected calibration error and Brier score against direct sums and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import brier_score_loss

from semgrad_guard.calibration.confidence import fit_isotonic
from semgrad_guard.paper.intervals import Resampling, brier, crossfitted, expected_calibration_error, reliability

ANSWERS = st.lists(st.tuples(st.integers(0, 999), st.booleans()), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(ANSWERS)
def test_ece_and_brier_are_what_their_definitions_say(answers: list[tuple[int, bool]]) -> None:
    thousandths, correct = (np.array(column) for column in zip(*answers, strict=True))
    confidence = (thousandths + 0.5) / 1000
    gaps = [
        abs(correct[thousandths // 100 == b].mean() - confidence[thousandths // 100 == b].mean())
        * (thousandths // 100 == b).mean()
        for b in set(thousandths // 100)
    ]
    found = expected_calibration_error(confidence, correct.tolist(), Resampling(count=20))
    assert found.value == pytest.approx(sum(gaps))
    score = brier(confidence, correct.tolist(), Resampling(count=20))
    assert score.value == pytest.approx(brier_score_loss(correct, confidence, pos_label=True))


def test_intervals_resample_questions() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(400)
    correct = (rng.random(400) < confidence).tolist()
    found = brier(confidence, correct, Resampling(count=500))
    spread = np.std((confidence - np.array(correct)) ** 2) / 20
    assert found.low == pytest.approx(found.value - 1.96 * spread, abs=0.004)  # type: ignore[operator]
    assert found.high == pytest.approx(found.value + 1.96 * spread, abs=0.004)  # type: ignore[operator]


def test_answers_without_a_probability_play_no_part() -> None:
    confidence = np.array([0.9, np.nan, 0.2])
    assert brier(confidence, [True, True, False]).value == pytest.approx((0.01 + 0.04) / 2)
    assert expected_calibration_error(confidence, [True, True, False]).value == pytest.approx((0.1 + 0.2) / 2)
    nothing = np.full(3, np.nan)
    assert brier(nothing, [True, True, False]).value is None
    assert expected_calibration_error(nothing, [True, True, False]).value is None
    assert len(reliability(nothing, [True, True, False]).count) == 0


def test_no_answer_makes_its_own_probability() -> None:
    """Turning one label round changes others' probabilities and never its own."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=40).tolist()
    correct = (rng.random(40) < 0.5).tolist()
    before = crossfitted(scores, correct)
    for row in range(8):
        turned = [label != (i == row) for i, label in enumerate(correct)]
        after = crossfitted(scores, turned)
        assert after[row] == before[row]
        assert (after != before).any()


def test_crossfitting_keeps_rows_and_skips_what_has_no_score() -> None:
    scores = [None if i % 7 == 0 else float(i) for i in range(60)]
    correct = [i < 30 for i in range(60)]
    found = crossfitted(scores, correct)
    assert np.isnan(found[::7]).all()
    kept = ~np.isnan(found)
    assert kept.sum() == 60 - 9
    assert (found[kept][np.array(correct)[kept]] > 0.5).mean() > 0.9
    in_sample = fit_isotonic(np.arange(60.0), np.array(correct))
    assert found[1] == pytest.approx(in_sample(1.0), abs=0.05)
    assert np.isnan(crossfitted([0.1, 0.2, None], [True, False, True])).all()


def test_the_diagram_has_exact_intervals() -> None:
    confidence = np.array([0.95] * 10 + [1.0] * 2 + [0.31] * 5)
    correct = [True] * 9 + [False] + [True] * 2 + [False] * 5
    found = reliability(confidence, correct)
    assert found.count.tolist() == [5, 12]
    assert found.accuracy.tolist() == [0.0, pytest.approx(11 / 12)]
    assert found.confidence.tolist() == [pytest.approx(0.31), pytest.approx((9.5 + 2) / 12)]
    for k, n, low, high in zip([0, 11], [5, 12], found.low, found.high, strict=True):
        exact = binomtest(k, n).proportion_ci(method="exact")
        assert (low, high) == (pytest.approx(exact.low), pytest.approx(exact.high))
