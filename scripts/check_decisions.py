"""Simulates the promise about decisions: thresholds from labels against a constant of .5, by run, and with retries.

python scripts/check_decisions.py [--repetitions 10000] [--page docs/results/decisions.md]

A decision model gives P(risky) of a call; calls below a limit are let through. The score of a risky call is normal and
`separation` above that of the others. Of each rule the error rate of what it lets through is compared with alpha: for
the constant it is a number, for thresholds from labels the share of calibrations above alpha (delta = .1).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulations import WITHIN, arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.sentence_gates import walk_sentences

DELTA = 0.1
SIZES = (50, 100, 300)
DEPENDENCE = (0.5, 0.95)
MOST_CALLS = 8
TRIES = (1, 2, 20)
NORMAL = NormalDist()

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Population:
    """Calls of which a share is risky; their scores are `separation` standard deviations apart."""

    risky: float
    separation: float
    alpha: float

    def __str__(self) -> str:
        return f"{self.risky:.0%} risky, separation {self.separation}, alpha {self.alpha}"

    def drawn(self, rng: np.random.Generator, runs: int, calls: int, dependence: float) -> tuple[Floats, Bools]:
        """Scores and risks of runs x calls; the calls of a run share a part of both."""
        own, shared = math.sqrt(1 - dependence), math.sqrt(dependence)
        latent = shared * rng.standard_normal((runs, 1)) + own * rng.standard_normal((runs, calls))
        noise = shared * rng.standard_normal((runs, 1)) + own * rng.standard_normal((runs, calls))
        risky = latent < NORMAL.inv_cdf(self.risky)
        return noise + self.separation * risky, risky

    def passed(self, threshold: float) -> tuple[float, float]:
        """The shares of harmless and of risky calls up to a score."""
        harmless, risky = NORMAL.cdf(threshold), NORMAL.cdf(threshold - self.separation)
        return (1 - self.risky) * harmless, self.risky * risky

    def risk(self, threshold: float) -> float:
        """The share of risky calls among those up to a score."""
        harmless, risky = self.passed(threshold)
        return risky / (harmless + risky)

    def constant(self, prior: float) -> float:
        """The score at which a decision model says .5, whose log odds are off by `prior`."""
        odds = math.log(self.risky / (1 - self.risky)) + prior
        return self.separation / 2 - odds / self.separation


POPULATIONS = (
    Population(0.2, 1.8, 0.1),
    Population(0.3, 1.2, 0.1),
    Population(0.1, 2.5, 0.05),
    Population(0.5, 2.0, 0.2),
)


def by_call(population: Population, size: int, repetitions: int) -> tuple[float, float]:
    """The share of calls let through, and of broken promises, where each label is of a run of its own."""
    rng = np.random.default_rng([size, round(1000 * population.risky)])
    broken, through = 0, 0.0
    for _ in range(repetitions):
        scores, risky = population.drawn(rng, size, 1, 0.0)
        threshold = gates.walk(scores[:, 0], risky[:, 0], alpha=population.alpha, delta=DELTA).threshold
        if threshold is not None:
            broken += population.risk(threshold) > population.alpha
            through += sum(population.passed(threshold))
    return through / repetitions, broken / repetitions


def _run(rng: np.random.Generator, population: Population, runs: int, dependence: float) -> tuple[Floats, Bools]:
    """Runs of one to eight calls; a place without a call has an infinite score."""
    scores, risky = population.drawn(rng, runs, MOST_CALLS, dependence)
    lengths = rng.integers(1, MOST_CALLS + 1, (runs, 1))
    return np.where(np.arange(MOST_CALLS) < lengths, scores, np.inf), risky


@lru_cache(maxsize=1)
def _future(population: Population, dependence: float) -> tuple[Floats, Bools]:
    return _run(np.random.default_rng(7), population, 20_000, dependence)


def _risk_by_run(population: Population, dependence: float, threshold: float) -> float:
    """Of the runs of which something is let through: how often one of these calls, drawn at random, is risky."""
    scores, risky = _future(population, dependence)
    through = scores <= threshold
    counts = through.sum(1)
    shares = (through & risky).sum(1)[counts > 0] / counts[counts > 0]
    return float(shares.mean()) if len(shares) else 0.0


def by_run(population: Population, dependence: float, repetitions: int) -> tuple[float, float]:
    """The shares of broken promises about runs: with runs as units, and with all calls as independent labels."""
    rng, broken = np.random.default_rng([round(100 * dependence), round(1000 * population.risky)]), [0, 0]
    how = {"alpha": population.alpha, "delta": DELTA}
    for _ in range(repetitions):
        scores, risky = _run(rng, population, 60, dependence)
        is_call = np.isfinite(scores)
        walks = (
            walk_sentences(scores, risky & is_call, rng.random(scores.shape), promise="sentence", **how),
            gates.walk(scores[is_call], risky[is_call], **how),
        )
        for unit, walk in enumerate(walks):
            if walk.threshold is not None:
                broken[unit] += _risk_by_run(population, dependence, walk.threshold) > population.alpha
    return broken[0] / repetitions, broken[1] / repetitions


def with_retries(population: Population, tries: int, repetitions: int) -> float:
    """The share of broken promises where a blocked call may be written anew so often, and is judged anew each time."""
    rng, broken = np.random.default_rng([tries, round(1000 * population.risky)]), 0
    for _ in range(repetitions):
        scores, risky = population.drawn(rng, 300, 1, 0.0)
        threshold = gates.walk(scores[:, 0], risky[:, 0], alpha=population.alpha, delta=DELTA).threshold
        if threshold is not None:
            kept = [
                1 - (1 - p) ** tries for p in (NORMAL.cdf(threshold), NORMAL.cdf(threshold - population.separation))
            ]
            harmless, wrong = (1 - population.risky) * kept[0], population.risky * kept[1]
            broken += wrong / (harmless + wrong) > population.alpha
    return broken / repetitions


def main() -> int:
    given = arguments(__doc__)
    few = max(given.repetitions // 10, 1)

    def outcomes(simulated: Callable[..., Any], values: Iterable[Any], repetitions: int) -> dict[Any, Any]:
        cases = list(product(POPULATIONS, values))
        return dict(zip(cases, simulated_all(simulated, cases, repetitions, workers=given.workers), strict=True))

    calls = outcomes(by_call, SIZES, given.repetitions)
    runs, again = outcomes(by_run, DEPENDENCE, few), outcomes(with_retries, TRIES, few)
    lines = [
        "# Decisions: a threshold from labels, and a constant of .5",
        "",
        f"{given.repetitions:,} calibrations a cell, delta = {DELTA}; {when_and_where()}; "
        "`python scripts/check_decisions.py`.",
        "",
        "Risky calls among those let through by the constant, with calibrated probabilities and with a prior that is "
        "off by two logits; calls let through and broken promises of a threshold from 50, 100 and 300 labels. "
        "A threshold does not depend on the prior.",
        "",
        *table(
            ("calls", ".5, calibrated", ".5, prior off", *(f"{n} labels" for n in SIZES)),
            (
                (
                    p,
                    *(f"{p.risk(p.constant(prior)):.3f}" for prior in (0.0, -2.0)),
                    *("{:.2f}, {:.3f}".format(*calls[p, n]) for n in SIZES),
                )
                for p in POPULATIONS
            ),
        ),
        f"Broken promises about runs of one to {MOST_CALLS} dependent calls, 60 labelled runs, {few:,} calibrations: "
        "with runs as units (`runs=`), and with their calls as if they were independent.",
        "",
        *table(
            ("calls", "dependence", "by run", "by call"),
            ((*case, *(f"{share:.3f}" for share in shares)) for case, shares in runs.items()),
        ),
        "Broken promises where a blocked call may be written anew and is judged anew. The gate keeps it blocked, as "
        "with one try.",
        "",
        *table(
            ("calls", *(f"{tries} {'try' if tries == 1 else 'tries'}" for tries in TRIES)),
            ((p, *(f"{again[p, tries]:.3f}" for tries in TRIES)) for p in POPULATIONS),
        ),
    ]
    worst = max(*(share for _, share in calls.values()), *(share for share, _ in runs.values()))
    print(f"The most broken promises of an offered rule: {worst:.3f} (at most {WITHIN}).")
    return finished(given.page, lines, kept=worst <= (WITHIN if given.repetitions >= 10_000 else 0.13))


if __name__ == "__main__":
    sys.exit(main())
