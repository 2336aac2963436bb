"""The guarantee itself: simulate many calibrations, count how often the true error rate exceeds alpha.

In a `Population` the score is uniform on [0, 1] and an answer at u is wrong with probability base (p + 1) u^p, so the
true error rate among answers at or below t is base t^p, in closed form. Settings are those of design/calibration.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from semgrad_guard.calibration import Calibration, calibrate, gates

REPEATS = 200
DELTA = 0.1


@dataclass(frozen=True)
class Population:
    """base: error rate when everything is answered; p: how well the score tells right from wrong (0: not at all)."""

    base: float
    p: float

    @classmethod
    def with_oracle(cls, base: float, *, alpha: float, coverage: float) -> Population:
        """The population whose largest threshold with an error rate of alpha lets `coverage` through."""
        return cls(base, math.log(alpha / base) / math.log(coverage))

    def draw(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        scores = rng.random(n)
        return scores, rng.random(n) < self.base * (self.p + 1) * scores**self.p

    def risk(self, threshold: float | None) -> float:
        """True error rate among the answers let through; 0 where nothing is."""
        if threshold is None or threshold <= 0:
            return 0.0
        return self.base * min(1.0, threshold) ** self.p


def naive_threshold(scores: NDArray[np.float64], wrong: NDArray[np.bool_], alpha: float) -> float | None:
    """The largest threshold whose error rate on this very set is at most alpha."""
    order = np.argsort(scores)
    kept = np.cumsum(wrong[order]) <= alpha * np.arange(1, len(scores) + 1)
    return float(scores[order][np.flatnonzero(kept)[-1]]) if kept.any() else None


SETTINGS = [
    pytest.param(0.43, 0.2, 0.52, 500, id="base.43-alpha.2-n500"),
    pytest.param(0.20, 0.1, 0.82, 200, id="base.20-alpha.1-n200"),
    pytest.param(0.20, 0.1, 0.82, 2000, id="base.20-alpha.1-n2000"),
    pytest.param(0.30, 0.1, 0.40, 500, id="base.30-alpha.1-n500"),
]
COVERAGE_FLOOR = {(0.43, 500): 0.33, (0.20, 200): 0.60, (0.20, 2000): 0.74, (0.30, 500): 0.13}


@pytest.mark.parametrize(("base", "alpha", "coverage", "n"), SETTINGS)
def test_calibrate_keeps_the_promise_and_stays_useful(base: float, alpha: float, coverage: float, n: int) -> None:
    population = Population.with_oracle(base, alpha=alpha, coverage=coverage)
    rng = np.random.default_rng(20)
    found: list[Calibration] = []
    for _ in range(REPEATS):
        scores, wrong = population.draw(rng, n)
        found.append(calibrate(scores, ~wrong, alpha=alpha, delta=DELTA))
    violations = np.mean([population.risk(c.threshold) > alpha for c in found])
    reached = np.mean([c.threshold or 0.0 for c in found])
    print(f"violations {violations:.3f} coverage {reached:.3f} of {coverage}")
    assert violations <= DELTA
    assert reached >= COVERAGE_FLOOR[base, n]


@pytest.mark.parametrize(("base", "alpha", "coverage", "n"), SETTINGS)
def test_the_naive_threshold_breaks_the_promise(base: float, alpha: float, coverage: float, n: int) -> None:
    population = Population.with_oracle(base, alpha=alpha, coverage=coverage)
    rng = np.random.default_rng(21)
    thresholds = [naive_threshold(*population.draw(rng, n), alpha) for _ in range(REPEATS)]
    violations = np.mean([population.risk(t) > alpha for t in thresholds])
    print(f"naive violations {violations:.3f}")
    assert violations > 0.35


def test_a_useless_score_just_above_alpha_is_the_hardest_case() -> None:
    """Every threshold has an error rate just above alpha: anything let through is a violation."""
    alpha, population = 0.2, Population(base=0.2001, p=0.0)
    rng = np.random.default_rng(22)
    walks = [gates.walk(*population.draw(rng, 140), alpha=alpha, delta=DELTA) for _ in range(2000)]
    violations = np.mean([walk.accepted is not None for walk in walks])
    print(f"useless score: {violations:.3f}")
    assert 0.03 <= violations <= DELTA + 0.013  # 2 standard errors above delta; not vacuous either


def test_violations_come_only_with_the_promised_probability_with_tied_scores() -> None:
    """Scores with 12 values only, error rate just above alpha at every one of them."""
    alpha, rng, violations = 0.2, np.random.default_rng(24), 0
    for _ in range(REPEATS):
        scores = rng.integers(0, 12, 400).astype(float)
        correct = rng.random(400) >= 0.2001
        violations += calibrate(scores, correct, alpha=alpha, delta=DELTA).threshold is not None
    print(f"tied scores: {violations / REPEATS:.3f}")
    assert violations / REPEATS <= DELTA + 0.042  # 2 standard errors
