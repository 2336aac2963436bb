"""Simulates the promise: how often a calibration's true risk exceeds alpha, and how much it delivers.

python scripts/check_guarantee.py [--repetitions 10000] [--page docs/results/guarantee.md]

Each cell draws so many calibration sets from a population whose risk is known exactly. It fails where more than .106 of
them exceed alpha in a population of the procedure's assumption, or more than .12 elsewhere (delta = .1; three standard
errors of 10,000 repetitions are .009). With `--page` it writes the tables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import special
from simulations import WITHIN, arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration import gates, planning, thresholds
from semgrad_guard.calibration.gates import share_of

DELTA = 0.1
SIZES = (50, 100, 300, 1000)
HOSTILE = 0.12
Floats = NDArray[np.float64]


class Population(Protocol):
    """Scores and labels, with the share of answers and the error rate up to a threshold in closed form."""

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Floats, NDArray[np.bool_]]: ...

    def share(self, threshold: float) -> float: ...

    def risk(self, threshold: float) -> float: ...


@dataclass(frozen=True)
class Normal:
    """Scores of right and of wrong answers are normal, so far apart that they have this AUROC."""

    base: float
    auroc: float

    @property
    def shift(self) -> float:
        return float(special.ndtri(self.auroc)) * math.sqrt(2)

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        wrong = rng.random(n) < self.base
        return self.scores(rng, wrong), wrong

    def scores(self, rng: np.random.Generator, wrong: NDArray[np.bool_]) -> Floats:
        """Scores of answers, wrong or not."""
        return rng.normal(size=len(wrong)) + self.shift * wrong

    def _wrong(self, threshold: float) -> float:
        return self.base * float(special.ndtr(threshold - self.shift))

    def share(self, threshold: float) -> float:
        return self._wrong(threshold) + (1 - self.base) * float(special.ndtr(threshold))

    def risk(self, threshold: float) -> float:
        return self._wrong(threshold) / max(self.share(threshold), 1e-300)


@dataclass(frozen=True)
class Steps:
    """Uniform scores; answers from one edge to the next are wrong at one rate."""

    edges: tuple[float, ...]
    rates: tuple[float, ...]

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        scores = rng.random(n)
        at = np.searchsorted(self.edges, scores, side="right") - 1
        return scores, rng.random(n) < np.array(self.rates)[at]

    def share(self, threshold: float) -> float:
        return min(1.0, max(0.0, threshold))

    def risk(self, threshold: float) -> float:
        pieces = zip(pairwise((*self.edges, 1.0)), self.rates, strict=True)
        wrong = sum(rate * max(0.0, min(threshold, end) - start) for (start, end), rate in pieces)
        return wrong / max(self.share(threshold), 1e-300)


@dataclass(frozen=True)
class Design:
    """A population with the alpha that is promised; `hostile` where it breaks an assumption of the default."""

    title: str
    population: Population
    alpha: float
    hostile: bool = False


DESIGNS = (
    Design("20 % wrong, AUROC 0.80", Normal(0.2, 0.8), 0.1),
    Design("30 % wrong, AUROC 0.75", Normal(0.3, 0.75), 0.2),
    Design("10 % wrong, AUROC 0.75", Normal(0.1, 0.75), 0.05),
    Design("40 % wrong, AUROC 0.85", Normal(0.4, 0.85), 0.2),
    Design("48 % wrong, AUROC 0.70", Normal(0.48, 0.7), 0.3),
    Design("everywhere just above alpha", Steps((0.0,), (0.1001,)), 0.1),
    Design("the surest 5 % half wrong", Steps((0.0, 0.05, 0.6), (0.5, 0.02, 0.5)), 0.1, hostile=True),
    Design("the surest 25 % at 13 %", Steps((0.0, 0.25, 0.6), (0.13, 0.02, 0.5)), 0.1, hostile=True),
    Design("slow fall to alpha", Steps((0.0, 0.15), (0.14, 0.092)), 0.1, hostile=True),
    Design("a spike of mistakes", Steps((0.0, 0.3, 0.31, 0.7), (0.05, 1.0, 0.1, 0.6)), 0.1, hostile=True),
    Design(
        "a saw around alpha",
        Steps((0.0, 0.2, 0.22, 0.4, 0.42, 0.6, 0.62), (0.08, 0.6, 0.08, 0.6, 0.08, 0.6, 0.11)),
        0.1,
        hostile=True,
    ),
)


JUST_ABOVE = Design("10.5 % wrong, scores that tell nothing", Normal(0.105, 0.5), 0.1)
"""The hardest population for several tries: every threshold is bad."""


@dataclass(frozen=True)
class Cell:
    """Of one design and number of labels: sets with a threshold, what is delivered, and sets with a bad threshold."""

    design: Design
    n: int
    found: float
    coverage: float
    violated: float

    @property
    def holds(self) -> bool:
        return self.violated <= (HOSTILE if self.design.hostile else WITHIN)

    @property
    def figures(self) -> str:
        return f"{self.coverage:.3f} in {self.found:.2f} ({self.violated:.3f})"

    def __str__(self) -> str:
        return f"{self.design.title}, {self.n} labels: {self.figures}{'' if self.holds else '  <- too often'}"


def simulated(design: Design, n: int, repetitions: int) -> Cell:
    rng = np.random.default_rng(1)
    found = coverage = violated = 0.0
    for _ in range(repetitions):
        scores, wrong = design.population.draw(rng, n)
        threshold = gates.walk(scores, wrong, alpha=design.alpha, delta=DELTA).threshold
        if threshold is not None:
            found += 1
            coverage += design.population.share(threshold)
            violated += design.population.risk(threshold) > design.alpha
    return Cell(design, n, found / repetitions, coverage / repetitions, violated / repetitions)


TRIED = ("8 scores", "a score, then the best AUROC of 8", "5 alphas", "sets growing by 25")


def tried(design: Design, kind: str, shared: bool, repetitions: int) -> float:
    """How often the kept threshold of several tries on the same labels has a risk above its alpha.

    Kept is the threshold that delivers most of its set; of alphas, any of them; of growing sets, the first that is
    found. The scores have independent noise. `shared`: the tries share delta.
    """
    rng, population, violated = np.random.default_rng(2), design.population, 0
    if not isinstance(population, Normal):
        raise TypeError("several scores are drawn for normal populations")

    def threshold(scores: Floats, wrong: NDArray[np.bool_], alpha: float, number: int) -> float | None:
        delta = share_of(DELTA, number if shared else 0)
        return gates.walk(scores, wrong, alpha=alpha, delta=delta).threshold

    for _ in range(repetitions):
        if kind == "5 alphas":
            scores, wrong = population.draw(rng, 100)
            alphas = [design.alpha * factor for factor in (1, 0.5, 0.75, 1.5, 2)]
            found = [(alpha, threshold(scores, wrong, alpha, k)) for k, alpha in enumerate(alphas, start=1)]
            violated += any(t is not None and population.risk(t) > alpha for alpha, t in found)
            continue
        if kind == "sets growing by 25":
            scores, wrong = population.draw(rng, 500)
            sizes = enumerate(range(50, 501, 25), start=1)
            kept = next(
                (t for k, n in sizes if (t := threshold(scores[:n], wrong[:n], design.alpha, k)) is not None), None
            )
        else:
            wrong = rng.random(100) < population.risk(math.inf)
            columns = [population.scores(rng, wrong) for _ in range(8)]
            if kind == "a score, then the best AUROC of 8":
                columns = [columns[0], max(columns[1:], key=lambda column: planning.auroc(column, ~wrong) or 0.0)]
            outcomes = [
                (column, threshold(column, wrong, design.alpha, k)) for k, column in enumerate(columns, start=1)
            ]
            kept = max(outcomes, key=lambda o: -1 if o[1] is None else int((o[0] <= o[1]).sum()))[1]
        violated += kept is not None and population.risk(kept) > design.alpha
    return violated / repetitions


def best(design: Design) -> float:
    """The share that the largest threshold of a risk of at most alpha delivers."""
    grid = np.linspace(-4, 6, 20_001) if isinstance(design.population, Normal) else np.linspace(0, 1, 20_001)[1:]
    kept = [design.population.share(float(t)) for t in grid if design.population.risk(float(t)) <= design.alpha]
    return max(kept, default=0.0)


def confidence_rows() -> Iterator[tuple[object, ...]]:
    """P(correct) of at least 0.9, claimed and true, by map and number of labels: 200 sets a cell."""
    rng = np.random.default_rng(3)
    for population in (Normal(0.2, 0.8), Normal(0.44, 0.75), Normal(0.05, 0.8)):
        for n in SIZES[:3]:
            sums = {thresholds.fit_isotonic: np.zeros(3), thresholds.fit_ranks: np.zeros(3)}
            for _ in range(200):
                scores, wrong = population.draw(rng, n)
                later, truth = population.draw(rng, 300)
                for fit, total in sums.items():
                    fitted = fit(scores, ~wrong)
                    claim = np.array([fitted(score) for score in later.tolist()])
                    high = claim >= 0.9
                    total += (claim[high].sum(), (~truth[high]).sum(), high.sum())
            shown = (f"{c / max(k, 1):.3f} / {t / max(k, 1):.3f} ({k / 60_000:.2f})" for c, t, k in sums.values())
            yield f"{population.base:.0%} wrong, AUROC {population.auroc:g}", n, *shown


def main() -> int:
    given = arguments(__doc__)
    cells = simulated_all(simulated, product(DESIGNS, SIZES), given.repetitions, workers=given.workers)
    few, tried_on = given.repetitions // 5, (DESIGNS[0], JUST_ABOVE)
    tries = list(product(tried_on, TRIED, (True, False)))
    shares = dict(zip(tries, simulated_all(tried, tries, few, workers=given.workers), strict=True))
    lines = [
        "# The promise, simulated",
        "",
        f"`make check-guarantee`, {when_and_where()}: {given.repetitions:,} calibrations a cell, delta = {DELTA:g}. A "
        "cell gives the mean share of answers that is delivered, how often a threshold is found, and in brackets how "
        "often the true error rate among the delivered answers exceeds alpha. The last is to be at most delta.",
        "",
        "The last five populations break the assumption: error rates do not rise with the score.",
        "",
        *table(
            ("population", "alpha", *(f"{n} labels" for n in SIZES), "best possible"),
            (
                (d.title, f"{d.alpha:g}", *(cell.figures for cell in cells if cell.design == d), f"{best(d):.3f}")
                for d in DESIGNS
            ),
        ),
        "## Tries on the same labels",
        "",
        "How often the kept threshold is bad, where tries share delta and (in brackets) where each has all of it. "
        f"100 labels, or 50 to 500 in growing sets; {few:,} repetitions. Kept is the threshold that delivers most; the "
        "scores have independent noise.",
        "",
        *table(
            ("population", *TRIED),
            (
                (d.title, *(f"{shares[d, kind, True]:.3f} ({shares[d, kind, False]:.3f})" for kind in TRIED))
                for d in tried_on
            ),
        ),
        "## P(correct)",
        "",
        "The mean P(correct) of answers with 0.9 and more, the share of them that is right, and their share of all "
        "answers. The default is Platt's curve over ranks below 300 labels, and isotonic regression from then on.",
        "",
        *table(
            ("population", "labels", *(f"{fit}: claimed / true (share)" for fit in ("isotonic", "curve over ranks"))),
            confidence_rows(),
        ),
    ]
    kept = all(share <= WITHIN for (_, _, shared), share in shares.items() if shared)
    return finished(given.page, lines, kept=kept and all(cell.holds for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
