"""Coverage at a guaranteed error rate: the share of questions that a promise leaves to answer, on unseen questions.

For a promised error rate alpha, half of the questions calibrate a threshold and the other half measures its
coverage; over many seeded halves. Neither AUROC nor AURC tells a user of the guard this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import gates
from semgrad_guard.metrics import Floats, as_arrays

ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
SPLITS = 100


@dataclass(frozen=True)
class GuaranteedCoverage:
    """The coverage of a promise of at most `alpha` errors with probability 1 - `DELTA`. One entry per split.

    `coverage` is the share of the measuring half that is let through, in [0, 1], and 0 where no threshold keeps the
    promise; `risk` is the share of wrong answers among those, nan where nothing is let through; `error` is the share of
    wrong answers in the whole half, which are delivered without a guard.
    """

    alpha: float
    coverage: Floats
    risk: Floats
    error: Floats

    @property
    def mean_coverage(self) -> float:
        """The mean over all splits, those that let nothing through included."""
        return float(self.coverage.mean())

    @property
    def mean_risk(self) -> float:
        """The mean error rate of the answers let through; nan if there are never any."""
        return float(np.nanmean(self.risk)) if self.nothing < 1.0 else math.nan

    @property
    def withheld_wrong(self) -> float:
        """The share of all wrong answers that are withheld, over all halves together; 0 where none is wrong."""
        return _share(self.error.sum() - self._delivered_wrong, self.error.sum())

    @property
    def withheld_right(self) -> float:
        """The share of all right answers that are withheld; 0 where none is right."""
        right = (1 - self.error).sum()
        return _share(right - (self.coverage.sum() - self._delivered_wrong), right)

    @property
    def _delivered_wrong(self) -> float:
        return float(np.nansum(self.coverage * self.risk))

    @property
    def violations(self) -> float:
        """The share of splits whose error rate in the measuring half exceeds alpha.

        The promise concerns the error rate over all questions. A measuring half scatters around it, so this share may
        exceed delta somewhat where the promise is kept with little to spare.
        """
        return float((self.risk > self.alpha).mean())

    @property
    def nothing(self) -> float:
        """The share of splits in which no threshold keeps the promise, or nothing is below it."""
        return float(np.isnan(self.risk).mean())


def guaranteed_coverage(
    uncertainties: Sequence[float | None], correct: Sequence[bool], *, alpha: float, splits: int = SPLITS
) -> GuaranteedCoverage | None:
    """Calibrate on a random half and measure on the other, `splits` times; None with fewer than two questions."""
    scores, labels = as_arrays(uncertainties, correct)
    if len(scores) < 2:
        return None
    found = [
        _measure(scores[rest], labels[rest], threshold(scores[half], labels[half], alpha=alpha))
        for half, rest in halves(len(scores), splits=splits)
    ]
    coverage, risk, error = np.array(found, dtype=np.float64).T
    return GuaranteedCoverage(alpha, coverage, risk, error)


def halves(n: int, *, splits: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """(calibrating rows, measuring rows) of n; the same for every method."""
    rng = np.random.default_rng([0, n])
    for _ in range(splits):
        order = rng.permutation(n)
        yield np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def threshold(scores: Floats, correct: NDArray[np.bool_], *, alpha: float) -> float | None:
    """The threshold that `calibrate` would choose from these answers, without the rest of its record."""
    finite = np.isfinite(scores)
    scores, wrong = scores[finite], ~correct[finite]
    return gates.walk(scores, wrong, alpha=alpha, delta=DELTA).threshold if len(scores) else None


def fewest_questions(*, alpha: float) -> int:
    """How many scored questions it takes before half of them could show an error rate of at most alpha at all."""
    return 2 * gates.fewest_answers(alpha=alpha, delta=DELTA)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _measure(scores: Floats, correct: NDArray[np.bool_], limit: float | None) -> tuple[float, float, float]:
    """(coverage, risk, error without a threshold); scores that are nan are never let through."""
    error = float((~correct).mean())
    let_through = np.isfinite(scores) & (scores <= limit) if limit is not None else np.zeros(len(scores), np.bool_)
    if not let_through.any():
        return 0.0, math.nan, error
    return float(let_through.mean()), float((~correct[let_through]).mean()), error
