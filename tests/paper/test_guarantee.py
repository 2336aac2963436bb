"""Coverage at a guaranteed error rate: the threshold of `calibrate`, and a promise that holds on the other half."""

from __future__ import annotations

import math

import numpy as np
import pytest

from semgrad_guard.calibration import calibrate
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.paper.coverage import GuaranteedCoverage, fewest_questions, guaranteed_coverage, halves, threshold

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
    assert (found.risk == 0.0).all()
    measured = [np.mean([scores[i] is not None for i in rest]) for _, rest in halves(400, splits=10)]
    assert found.coverage.tolist() == pytest.approx(measured)
    for half, rest in halves(7, splits=3):
        assert sorted([*half, *rest]) == list(range(7))


def test_nothing_is_let_through_where_no_promise_can_be_kept() -> None:
    for scores, correct in (([0.1] * 50, [False] * 50), ([None] * 50, [True] * 50), ([0.1, 0.2], [True, False])):
        found = guaranteed_coverage(scores, correct, alpha=0.1, splits=5)
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


GRADED = [(0.1, True), (0.2, True), (0.3, False), (0.4, True), (0.5, False), (None, False)]


def test_the_effect_counts_every_answer_once() -> None:
    effect = Effect.of(GRADED, lambda score: score is not None and score <= 0.3)
    assert effect == Effect(answers=6, wrong=3, delivered=3, delivered_wrong=1)
    assert str(effect) == (
        "error 50.0% without the guard, 33.3% with it; withheld: 2 of 3 wrong answers, 1 of 3 right ones"
    )


@pytest.mark.parametrize(("alpha", "warned"), [(0.49, False), (0.5, True), (0.6, True)])
def test_a_promise_that_is_no_better_than_no_guard_is_doubted(alpha: float, warned: bool) -> None:
    doubt = Effect.of(GRADED, lambda _: True).doubt(alpha)
    assert (doubt is not None) is warned
    assert doubt is None or "without a guard 50.0% of these answers are wrong" in doubt


def test_the_effect_over_halves() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(400) < 0.3
    found = guaranteed_coverage((wrong + rng.random(400)).tolist(), (~wrong).tolist(), alpha=0.1, splits=20)
    assert found.error.mean() == pytest.approx(0.3, abs=0.05)
    delivered = found.mean_coverage
    kept_right = (1 - found.withheld_right) * (1 - found.error.mean())
    assert kept_right + (1 - found.withheld_wrong) * found.error.mean() == pytest.approx(delivered)
    assert found.mean_risk <= 0.1 < found.error.mean()
    none = guaranteed_coverage([0.1, 0.2], [True, True], alpha=0.1, splits=2)
    assert (none.withheld_right, none.withheld_wrong == 0, math.isnan(none.mean_risk)) == (1.0, True, True)
