"""Fixed-sequence testing over a grid of thresholds, from the most certain upward.

For a threshold t that was fixed without looking at the labelled answers, the errors among the N answers at or below t
are Binomial(N, risk(t)), so `binomial.p_values` is a valid test of "risk(t) exceeds alpha". The thresholds are tested
in rising order, each at the full level delta, and the walk stops at the first one that is not rejected: to let through
a threshold whose risk exceeds alpha, the walk must reject the *first* such threshold that it meets, which happens with
probability at most delta, however many thresholds there are (Bauer, Statistics in Medicine 10, 1991; Angelopoulos et
al., "Learn then Test", arXiv:2110.01052).

The grid comes from outside. It is walked from the first point that lets through enough of the calibration answers.
That looks at scores, never at labels, and is valid where answers beyond the point at which the risk reaches alpha are
wrong at a rate of at least alpha. *Proof.* Let t be the first threshold of the grid with a risk above alpha. Where the
walk begins at t or before, depends on the number of answers up to t alone; given it, their errors are binomial at the
risk of t. Where it begins beyond, it begins at the first threshold with enough answers; the answers up to the threshold
before are wrong at a risk above alpha, the others at a rate of at least alpha, independently. Both times the test that
has to fail for a violation fails with probability at most delta. (Where the score points the wrong way, the excess is
of the order of one grid cell; the tests measure it.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial

_MARGIN = 3
"""The first threshold should let through this many times the fewest answers that could keep the promise."""


@dataclass(frozen=True)
class Walk:
    """Where a walk over `grid` began and where it ended.

    `accepted` indexes the last threshold that keeps the promise (None: not even the first did). `answered` and `wrong`
    count tested answers at or below that threshold, or, with None, at or below the first one tested.
    """

    first: int
    accepted: int | None
    answered: int
    wrong: int


def start_count(n: int, *, alpha: float, delta: float) -> int:
    """How many of n tested answers the first threshold should let through, at least.

    Three times the fewest that could keep the promise, so that one early error does not end the walk; in a small set
    half of its answers, but never fewer than that fewest.
    """
    fewest = binomial.fewest_answers(alpha=alpha, delta=delta)
    return max(fewest, min(_MARGIN * fewest, n // 2))


def first_testable(scores: NDArray[np.float64], grid: NDArray[np.float64], *, alpha: float, delta: float) -> int:
    """Index of the first threshold of an outside `grid` that lets through enough answers; the last one if none does."""
    answered = _answered(np.sort(scores), grid)
    enough = answered >= start_count(len(scores), alpha=alpha, delta=delta)
    return int(np.argmax(enough)) if enough.any() else len(grid) - 1


def walk(
    scores: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    grid: NDArray[np.float64],
    *,
    first: int,
    alpha: float,
    delta: float,
) -> Walk:
    """Test the rising thresholds `grid[first:]` on the answers, stopping at the first that is not rejected."""
    order = np.argsort(scores, kind="stable")
    answered = _answered(scores[order], grid)
    errors = np.concatenate(([0], np.cumsum(wrong[order])))[answered]
    kept = binomial.p_values(errors[first:], answered[first:], alpha=alpha) <= delta
    last = last_in_a_row(kept)
    at = first + (last or 0)
    return Walk(first, None if last is None else at, int(answered[at]), int(errors[at]))


def in_a_row(passes: NDArray[np.bool_]) -> NDArray[np.intp]:
    """How many tests pass before the first that fails, along the last axis."""
    return np.logical_and.accumulate(passes, axis=-1).sum(axis=-1)


def last_in_a_row(passes: NDArray[np.bool_]) -> int | None:
    """The index of the last test before the first that fails; None where the first fails, or there is none."""
    row = int(in_a_row(passes))
    return row - 1 if row else None


def _answered(sorted_scores: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.intp]:
    """How many scores are at or below each threshold (ties with a threshold are let through)."""
    return np.searchsorted(sorted_scores, grid, side="right")
