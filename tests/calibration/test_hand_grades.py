"""Promises from few grades by hand: whose answers are graded, the record, and the promise by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from semgrad_guard.calibration import Calibration, calibrate, planning, rows_to_grade
from semgrad_guard.errors import CalibrationError

ALPHA = DELTA = 0.1
SHIFT = NormalDist().inv_cdf(0.8) * math.sqrt(2)


def drawn(seed: int, n: int = 1000) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores with an AUROC of 0.8, and which of the answers are right (80 %)."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < 0.2
    return rng.normal(size=n) + SHIFT * wrong, ~wrong


def labels_of(scores: Sequence[float | None] | NDArray[np.float64], correct: NDArray[np.bool_], m: int) -> list[Any]:
    rows = set(rows_to_grade(scores, alpha=ALPHA, by_hand=m))
    return [bool(right) if row in rows else None for row, right in enumerate(correct)]


def made(scores: Any, labels: Any, **how: Any) -> Calibration:
    return calibrate(scores, labels, alpha=ALPHA, delta=DELTA, **how)


def test_a_random_part_of_the_surest_is_to_be_graded_and_more_begins_with_less() -> None:
    scores, _ = drawn(1)
    few, many = (rows_to_grade(scores, alpha=ALPHA, by_hand=m) for m in (50, 200))
    border = np.sort(scores)[math.ceil(planning.share_to_grade(ALPHA) * 1000) - 1]
    assert many[:50] == few
    assert scores[many].max() <= border
    assert abs(float((scores[many] <= np.median(scores[scores <= border])).mean()) - 0.5) < 0.12
    assert rows_to_grade(scores, alpha=ALPHA, by_hand=5000) != sorted(rows_to_grade(scores, alpha=ALPHA, by_hand=5000))
    named = [f"question {row}" for row in range(1000)]
    assert rows_to_grade(scores, alpha=ALPHA, by_hand=50, groups=named) == rows_to_grade(
        [*scores, 9.0, None], alpha=ALPHA, by_hand=50, groups=[*named, "more", "unscored"]
    )  # another question draws anew only itself


@pytest.mark.parametrize(
    ("alpha", "least", "most"), [(0.01, 0.6, 0.8), (0.1, 0.55, 0.65), (0.4, 0.5, 0.5), (0.9, 0.5, 1)]
)
def test_the_share_to_grade_follows_from_alpha(alpha: float, least: float, most: float) -> None:
    assert least <= planning.share_to_grade(alpha) <= most


def test_the_record_tells_what_was_graded_and_claims_nothing_about_the_rest(tmp_path: Any) -> None:
    scores, correct = drawn(2)
    found = made(scores, labels_of(scores, correct, 200), by_hand=200)
    record = found.by_hand
    assert record is not None
    assert (record.count, found.n, found.n_tested) == (200, 1000, 200)
    assert found.threshold is not None
    assert found.threshold <= record.below
    assert found.coverage == (scores <= found.threshold).mean()
    assert found.effect is None
    assert (found.confidence(record.below + 1e-6), found.confidence(record.below) is None) == (None, False)
    assert Calibration.load(found.save(tmp_path / "c.json")) == found


def test_no_score_at_all_and_too_few_grades_are_told_in_words() -> None:
    with pytest.raises(CalibrationError, match="No answer has a finite score"):
        made([None, None], [None, None], by_hand=1)
    scores, correct = drawn(3)
    with pytest.raises(CalibrationError, match="20 of the 120 answers that are to be graded by hand have no grade"):
        made(scores, labels_of(scores, correct, 100), by_hand=120)
    scores, correct = drawn(4)
    labels = labels_of(scores, correct, 20)
    labels[next(row for row, label in enumerate(labels) if label)] = "abstained"
    found = made(scores, labels, by_hand=20)
    wrong = labels.count(False)
    assert (found.threshold, found.n_tested, found.n_wrong, found.n_abstained) == (None, 19, wrong, 1)
    assert wrong
    assert f"{wrong} of 19 grades by hand, a random part of the surest answers, are 'wrong'." in str(found.reason)
    assert "takes 22 scored answers. Grade more by hand" in str(found.reason)


def test_repeated_questions_of_traffic_are_drawn_one_by_one() -> None:
    """Copies of one question have lots of their own, so that a draw takes no question as a whole."""
    scores = np.repeat(np.arange(100.0), 5)
    rows = rows_to_grade(scores, alpha=ALPHA, by_hand=60, groups=np.repeat(np.arange(100), 5).tolist(), copies="keep")
    taken = np.bincount(np.array(rows) // 5, minlength=100)[:59]
    assert 0 < (taken == 5).sum() + (taken > 0).sum() < 60
    assert (taken % 5 != 0).any()


@pytest.mark.parametrize(("n", "by_hand"), [(100, 50), (160, 50), (160, 90)])
def test_the_truth_is_kept_where_every_threshold_is_bad(n: int, by_hand: int) -> None:
    """An error rate just above alpha everywhere: a threshold is found, and bad, in at most delta of the sets. Where
    more are graded, the surer answers abstain half of the time."""
    rng, repeats, found = np.random.default_rng(6), 250, 0
    for _ in range(repeats):
        scores, correct = rng.normal(size=n), rng.random(n) >= ALPHA + 1e-4
        labels = labels_of(scores, correct, by_hand)
        for row in np.flatnonzero((rng.random(n) < 0.5) & (scores < -0.3)) if by_hand > 50 else ():
            labels[row] = None if labels[row] is None else "abstained"
        found += made(scores, labels, by_hand=by_hand).threshold is not None
    assert 0.01 <= found / repeats <= DELTA + 0.057  # three standard errors
