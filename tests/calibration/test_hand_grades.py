"""Promises from few grades by hand: whose answers are graded, the bets, the record, and the promise by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from semgrad_guard.calibration import Calibration, calibrate, hand_grades, rows_to_grade
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
    border = np.sort(scores)[math.ceil(hand_grades.share_to_grade(ALPHA) * 1000) - 1]
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
    assert least <= hand_grades.share_to_grade(alpha) <= most


def test_the_record_tells_what_was_graded_and_claims_nothing_about_the_rest(tmp_path: Any) -> None:
    scores, correct = drawn(2)
    found = made(scores, labels_of(scores, correct, 200), by_hand=200)
    record = found.by_hand
    assert record is not None
    assert (record.count, record.machine, found.n, found.n_tested) == (200, False, 1000, 200)
    assert found.threshold is not None
    assert found.threshold <= record.below
    assert found.coverage == (scores <= found.threshold).mean()
    assert found.effect is None
    assert (found.confidence(record.below + 1e-6), found.confidence(record.below) is None) == (None, False)
    assert Calibration.load(found.save(tmp_path / "c.json")) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": [True] * 1000, "by_hand": None}, "give `by_hand`"),
        ({"robust": True}, "takes no `grid`"),
        ({"by_hand": 0}, "number of answers"),
        ({"by_hand": 120}, "20 of the 120 answers that are to be graded by hand have no grade"),
        ({"machine": [True]}, "machine has 1"),
        ({"machine": [None] * 1000}, r"machine\[\d+\] is None"),
    ],
)
def test_a_part_that_is_no_random_sample_is_refused(change: dict[str, Any], message: str) -> None:
    scores, correct = drawn(3)
    labels = labels_of(scores, correct, 100) if change.get("by_hand", 1) else [True] * 1000
    with pytest.raises(CalibrationError, match=message):
        made(scores, labels if change.get("by_hand", 1) is not None else correct, **{"by_hand": 100, **change})


def test_no_score_at_all_and_too_few_grades_are_told_in_words() -> None:
    with pytest.raises(CalibrationError, match="No answer has a finite score"):
        made([None, None], [None, None], by_hand=1)
    scores, correct = drawn(4)
    found = made(scores, labels_of(scores, correct, 20), by_hand=20)
    assert found.threshold is None
    assert "grades by hand" in str(found.reason)
    assert "Grade more by hand" in str(found.reason)


def test_repeated_questions_of_traffic_are_drawn_one_by_one() -> None:
    """Copies of one question have lots of their own, so that a draw takes no question as a whole."""
    scores = np.repeat(np.arange(100.0), 5)
    rows = rows_to_grade(scores, alpha=ALPHA, by_hand=60, groups=np.repeat(np.arange(100), 5).tolist(), copies="keep")
    taken = np.bincount(np.array(rows) // 5, minlength=100)[:59]
    assert 0 < (taken == 5).sum() + (taken > 0).sum() < 60
    assert (taken % 5 != 0).any()


def capital_by_hand(machine: Any, wrong: Any, hand: Any, alpha: float) -> float:
    """The bets of one test as a plain loop, from the docstring."""
    left, by_hand = len(wrong), int(sum(hand))
    capital, best, squares, seen = 1.0, 1.0, alpha * 0.3 * left / max(by_hand, 1), 1
    for g, y, i in zip(machine, wrong, hand, strict=True):
        if by_hand:
            p = by_hand / left
            x = g + (y - g) * i / p
            hoped = math.sqrt(2 * max(math.log(1 / DELTA) - math.log(capital), 0) / left * seen / squares)
            capital *= 1 - min(hoped, 0.9 / (1 / p - alpha)) * (x - alpha)
            squares, seen = squares + (x - alpha) ** 2, seen + 1
        best = max(best, capital)
        left, by_hand = left - 1, by_hand - i
    return best


def test_bets_equal_the_plain_loop() -> None:
    rng = np.random.default_rng(5)
    wrong, hand = (rng.random(300) < share for share in (0.03, 0.5))
    machine = wrong & (rng.random(300) < 0.8)
    inside = rng.random((3, 300)) < np.array([[1.0], [0.6], [0.2]])
    capital = hand_grades.bets(machine, wrong, hand, inside, alpha=ALPHA, enough=1 / DELTA)
    for found, rows in zip(capital, inside, strict=True):
        g, y, i = (column[rows].astype(int).tolist() for column in (machine, wrong, hand))
        assert found == pytest.approx(capital_by_hand(g, y, i, ALPHA), rel=1e-9)
    assert capital[0] >= 1 / DELTA


@pytest.mark.parametrize(("softness", "harshness"), [(0.0, 0.0), (0.5, 0.0), (0.2, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_capital_reaches_a_goal_with_its_inverse_as_probability(softness: float, harshness: float) -> None:
    """Exact: all grades of six answers with an error rate of alpha, and all draws of two by hand (Ville)."""
    alpha, size = 0.4, 6
    grades = np.array(list(product([(0, 0), (0, 1), (1, 0), (1, 1)], repeat=size)))
    wrong, machine = grades[..., 0], grades[..., 1]
    flagged = np.where(wrong, 1 - softness, harshness)
    chance = (np.where(wrong, alpha, 1 - alpha) * np.where(machine, flagged, 1 - flagged)).prod(axis=1)
    draws = list(combinations(range(size), 2))
    for enough in (1.2, 1.5, 2.0, 4.0):
        reached = 0.0
        for rows in draws:
            hand = np.isin(np.arange(size), rows)
            inside = np.ones_like(wrong, dtype=bool)
            capital = hand_grades.bets(machine, wrong, hand, inside, alpha=alpha, enough=enough)
            reached += float(chance @ (capital >= enough)) / len(draws)
        assert reached <= 1 / enough + 1e-12


@pytest.mark.parametrize(
    ("soft", "harsh", "tilted"), [(0.2, 0.0, False), (0.2, 0.0, True), (0.0, 0.2, False), (0.2, 0.2, True)]
)
@pytest.mark.parametrize("n", [100, 301])
def test_the_truth_is_kept_with_any_grader_where_every_threshold_is_bad(
    soft: float, harsh: float, tilted: bool, n: int
) -> None:
    """An error rate just above alpha everywhere: a threshold is found, and bad, in at most delta of the sets."""
    rng, repeats = np.random.default_rng(6), 400
    order = rng.random((repeats, n)).argsort(axis=1)
    wrong = rng.random((repeats, n)) < ALPHA + 1e-4
    softness = soft * (2 * (1 - order / n) if tilted else np.ones((repeats, n)))
    machine = np.where(wrong, rng.random((repeats, n)) >= softness, rng.random((repeats, n)) < harsh)
    hand = rng.random((repeats, n)).argsort(axis=1) < 60
    first = int(hand_grades.gate_counts(n, by_hand=60)[0])
    passes = hand_grades.bets(machine, wrong, hand, order < first, alpha=ALPHA, enough=1 / DELTA) >= 1 / DELTA
    assert passes.mean() <= DELTA + 0.045  # three standard errors


def test_a_machine_that_agrees_with_people_delivers_more_and_a_bad_one_none_of_the_truths() -> None:
    """Coverage of 100 grades by hand: alone, with a good machine, and with one that calls everything right."""
    shares = np.zeros(3)
    for seed in range(12):
        scores, correct = drawn(100 + seed)
        labels = labels_of(scores, correct, 100)
        good = correct | (np.random.default_rng(seed).random(1000) < 0.02)
        for at, machine in enumerate((None, good, np.ones(1000, dtype=bool))):
            shares[at] += made(scores, labels, by_hand=100, machine=machine).coverage / 12
    assert shares[1] > shares[0] + 0.05
    assert shares[2] <= shares[0]
