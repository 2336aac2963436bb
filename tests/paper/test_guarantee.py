"""Coverage at a guaranteed error rate: the threshold of `calibrate`, and a promise that holds on the other half."""

from __future__ import annotations

import math

import numpy as np
import pytest

from semgrad_guard.calibration import calibrate
from semgrad_guard.paper.guarantee import GuaranteedCoverage, fewest_questions, guaranteed_coverage, halves, threshold

RNG = np.random.default_rng(0)


def answers(n: int, *, knows: float, right: float = 0.7) -> tuple[list[float | None], list[bool]]:
    correct = RNG.random(n) < right
    return RNG.normal(knows * ~correct, 1.0).tolist(), correct.tolist()


@pytest.mark.parametrize("n", [2, 5, 30, 100, 400])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_threshold_is_that_of_a_calibration(n: int, alpha: float) -> None:
    scores, correct = answers(n, knows=2.0)
    scores[0] = None
    found = threshold(np.array([math.nan, *scores[1:]]), np.array(correct), alpha=alpha)
    assert found == calibrate(scores, correct, alpha=alpha, delta=0.1).threshold


def test_a_better_score_answers_more_and_a_looser_promise_too() -> None:
    good, poor = answers(600, knows=3.0), answers(600, knows=1.0)
    coverage = [
        guaranteed_coverage(*population, alpha=alpha).mean_coverage  # type: ignore[union-attr]
        for alpha in (0.05, 0.2)
        for population in (poor, good)
    ]
    assert coverage[0] < coverage[1]
    assert coverage[0] < coverage[2]
    assert coverage[1] <= coverage[3]


def test_the_promise_holds_on_the_other_half() -> None:
    shares = [
        guaranteed_coverage(*answers(600, knows=2.0), alpha=0.1, splits=20).violations  # type: ignore[union-attr]
        for _ in range(15)
    ]
    assert np.mean(shares) < 0.2  # delta = 0.1, and the measuring half's own scatter


def test_coverage_and_risk_belong_to_the_measuring_half() -> None:
    scores, correct = [0.1, None] * 200, [True, False] * 200
    found = guaranteed_coverage(scores, correct, alpha=0.2, splits=10)
    assert found is not None
    assert (found.risk == 0.0).all()
    measured = [np.mean([scores[i] is not None for i in rest]) for _, rest in halves(400, splits=10)]
    assert found.coverage.tolist() == pytest.approx(measured)
    for half, rest in halves(7, splits=3):
        assert sorted([*half, *rest]) == list(range(7))


def test_nothing_is_let_through_where_no_promise_can_be_kept() -> None:
    for scores, correct in (([0.1] * 50, [False] * 50), ([None] * 50, [True] * 50), ([0.1, 0.2], [True, False])):
        found = guaranteed_coverage(scores, correct, alpha=0.1, splits=5)
        assert found is not None
        assert (found.mean_coverage, found.violations, found.nothing) == (0.0, 0.0, 1.0)
    assert guaranteed_coverage([0.1], [True], alpha=0.1) is None


def test_shares_are_of_all_halves() -> None:
    risk = np.array([0.12, 0.1, math.nan, math.nan])
    found = GuaranteedCoverage(0.1, np.array([0.5, 0.3, 0.0, 0.0]), risk, np.full(4, 0.2))
    assert (found.mean_coverage, found.violations, found.nothing) == (pytest.approx(0.2), 0.25, 0.5)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_the_fewest_questions_could_just_keep_the_promise(alpha: float) -> None:
    n = fewest_questions(alpha=alpha)
    for questions, kept in ((n, True), (n - 2, False)):
        half = questions // 2
        found = threshold(np.zeros(half), np.ones(half, dtype=np.bool_), alpha=alpha)
        assert (found is not None) == kept
