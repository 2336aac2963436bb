"""Simulates the promises about sentences: how often a calibration's true rate exceeds alpha, and how much it delivers.

python scripts/check_sentences.py [--repetitions 10000] [--page docs/results/guarantee-sentences.md]

An answer has two to eight sentences, whose scores and truths depend on each other. A fifth of the sentences leans on
the one before. A cell fails where more than .106 of the calibrations exceed alpha = .15 (delta = .1; three standard
errors of 10,000 repetitions are .009), or where `drop` delivers less than `FLOORS` of the sentences.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from simulations import WITHIN, arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration.sentence_gates import Promise, totals, walk_sentences
from semgrad_guard.settings import OnDoubt

ALPHA, DELTA = 0.15, 0.1
SIZES = (50, 100, 200)
FLOORS = (0.27, 0.42, 0.52)
"""The shares of sentences that `drop` delivers at least under the promise about one sentence: `DESIGNS[0]`, by size."""
MOST = 8  # sentences
FORMS: tuple[OnDoubt, ...] = ("drop", "stop")
"""`escalate` compares the scores of `stop`."""

Kind = Literal["rising", "long answers worse", "fabricated", "flat"]


@dataclass(frozen=True)
class Design:
    """A population: `correlation` of the truths of an answer's sentences, before they are cut to true and false."""

    kind: Kind
    correlation: float
    leaning: float = 0.2

    def draw(self, rng: np.random.Generator, n: int, on_doubt: OnDoubt) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Compared scores of n answers' sentences, infinite where there is none, and which are wrong."""
        lengths, base = rng.integers(2, MOST + 1, (n, 1)), 0.3

        def latent(correlation: float) -> NDArray[np.float64]:
            own, shared = rng.normal(size=(n, MOST)), rng.normal(size=(n, 1))
            return math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own

        rates = 0.05 + 0.06 * lengths if self.kind == "long answers worse" else np.full((n, 1), base)
        if self.kind == "flat":  # the score tells nothing, and the rate is just above alpha
            rates, shift = np.full((n, 1), ALPHA + 0.0005), 0.0
        else:
            shift = stats.norm.ppf(0.85) * math.sqrt(2)
        wrong = latent(self.correlation) > stats.norm.ppf(1 - rates)
        scores = latent(self.correlation / 2) + shift * wrong
        if self.kind == "fabricated":  # 3 % of the answers: all is wrong, and as certain as the surest
            invented = rng.random((n, 1)) < 0.03
            wrong, scores = wrong | invented, np.where(invented, rng.normal(-1.2, 0.5, scores.shape), scores)
        leans = rng.random((n, MOST)) < self.leaning
        absent = np.arange(MOST) >= lengths
        return np.where(absent, np.inf, compared(scores, leans, on_doubt)), wrong & ~absent


def compared(scores: NDArray[np.float64], leans: NDArray[np.bool_], on_doubt: OnDoubt) -> NDArray[np.float64]:
    """`on_doubt.compared_scores` of many answers at once."""
    found = scores.copy()
    for place in range(1, scores.shape[1]):
        depends = leans[:, place] if on_doubt == "drop" else np.True_
        found[:, place] = np.where(depends, np.maximum(found[:, place], found[:, place - 1]), found[:, place])
    return found


@dataclass(frozen=True)
class Truth:
    """A large population's rates and its delivered share of sentences, at rising thresholds."""

    thresholds: NDArray[np.float64]
    rates: dict[Promise, NDArray[np.float64]]
    delivered: NDArray[np.float64]

    @classmethod
    def of(cls, scores: NDArray[np.float64], wrong: NDArray[np.bool_]) -> Truth:
        order = np.argsort(scores, axis=1)
        scores, wrong = np.take_along_axis(scores, order, 1), np.take_along_axis(wrong, order, 1)
        shares = np.cumsum(wrong, axis=1) / np.arange(1, MOST + 1)
        thresholds = np.unique(scores[np.isfinite(scores)])[::20]

        def total(values: NDArray[Any]) -> NDArray[Any]:
            return totals(scores, np.diff(values, axis=1, prepend=0), thresholds)

        answers = total(np.ones(scores.shape, dtype=int))
        return cls(
            thresholds,
            {
                "sentence": total(shares) / answers,
                "answer": total(np.logical_or.accumulate(wrong, axis=1).astype(int)) / answers,
            },
            total(np.broadcast_to(np.arange(1, MOST + 1), scores.shape)) / np.isfinite(scores).sum(),
        )

    def at(self, threshold: float) -> int:
        return int(np.searchsorted(self.thresholds, threshold, side="right")) - 1

    def best(self, promise: Promise) -> float:
        """The share that the largest threshold of a rate of at most alpha delivers."""
        return float(self.delivered[self.rates[promise] <= ALPHA].max(initial=0.0))


@lru_cache(maxsize=1)
def truth(design: Design, on_doubt: OnDoubt, answers: int) -> Truth:
    return Truth.of(*design.draw(np.random.default_rng(5), answers, on_doubt))


@dataclass(frozen=True)
class Cell:
    """The outcome of a design, a form of `on_doubt`, a size and a promise: means over the repetitions."""

    design: Design
    on_doubt: OnDoubt
    n: int
    promise: Promise
    coverage: float
    violated: float

    @property
    def floor(self) -> float:
        aimed = (self.design, self.on_doubt, self.promise) == (DESIGNS[0], "drop", "sentence")
        return FLOORS[SIZES.index(self.n)] if aimed else 0.0

    @property
    def holds(self) -> bool:
        return self.violated <= WITHIN and self.coverage >= self.floor


def simulated(design: Design, on_doubt: OnDoubt, n: int, repetitions: int, answers: int = 100_000) -> list[Cell]:
    """Both promises, on the same calibration sets."""
    known, rng = truth(design, on_doubt, answers), np.random.default_rng(1)
    coverage, violated = dict.fromkeys(get_args(Promise), 0.0), dict.fromkeys(get_args(Promise), 0)
    for _ in range(repetitions):
        scores, wrong = design.draw(rng, n, on_doubt)
        keys = rng.random(scores.shape)
        for promise in get_args(Promise):
            found = walk_sentences(scores, wrong, keys, promise=promise, alpha=ALPHA, delta=DELTA).threshold
            if found is not None and (at := known.at(found)) >= 0:
                coverage[promise] += known.delivered[at]
                violated[promise] += design.kind == "flat" or known.rates[promise][at] > ALPHA
    return [
        Cell(design, on_doubt, n, promise, coverage[promise] / repetitions, violated[promise] / repetitions)
        for promise in get_args(Promise)
    ]


DESIGNS = (
    Design("rising", 0.3, leaning=0.0),
    *(Design("rising", correlation) for correlation in (0.0, 0.3, 0.6)),
    Design("long answers worse", 0.3),
    Design("fabricated", 0.3),
    Design("flat", 0.95),
)


def rows(cells: Sequence[Cell], promise: Promise) -> Iterator[tuple[str, ...]]:
    for design in DESIGNS:
        row = [cell for cell in cells if (cell.design, cell.promise) == (design, promise)]
        best = {form: 0.0 if design.kind == "flat" else truth(design, form, 100_000).best(promise) for form in FORMS}
        shown = (f"{cell.coverage:.3f} of {best[cell.on_doubt]:.3f}" for cell in row if cell.n == SIZES[-1])
        title = f"{design.kind}, correlation {design.correlation:g}{'' if design.leaning else ', none leans'}"
        yield title, *shown, f"{max(cell.violated for cell in row):.3f}"


def main() -> int:
    given = arguments(__doc__)
    work = product(DESIGNS, FORMS, SIZES)
    cells = list(chain(*simulated_all(simulated, work, given.repetitions, workers=given.workers)))
    head = ("population", *FORMS, "violated, at most")
    lines = [
        "# The promises about sentences, simulated",
        "",
        f"`make check-guarantee`, {when_and_where()}: {given.repetitions:,} calibrations a cell, alpha = {ALPHA:g}, "
        f"delta = {DELTA:g}. A cell gives the mean share of sentences that {SIZES[-1]} answers deliver, of the best "
        f"possible one. Violated is how often the true rate exceeds alpha, with {SIZES[0]} to {SIZES[-1]} answers; it "
        "is to be at most delta. 30 % of the sentences are wrong, their scores have an AUROC of 0.85, and a fifth of "
        "them leans on the sentence before. In the flat population all thresholds are bad: the score tells nothing, "
        "and the rate is just above alpha.",
        "",
        "## One of an answer's delivered sentences is wrong",
        "",
        *table(head, rows(cells, "sentence")),
        "## An answer from which something is delivered holds a wrong sentence",
        "",
        *table(head, rows(cells, "answer")),
    ]
    return finished(given.page, lines, kept=all(cell.holds for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
