"""Exact tests of an error rate: binomial statements, thresholds in a fixed sequence, tries on the same labels.

**Binomial statements** are exact for k errors in n independent answers (Clopper & Pearson, "The use of confidence or
fiducial limits", Biometrika 26, 1934); nothing is approximated by a normal distribution.

**A fixed sequence** of thresholds is tested from the most certain upward. For a threshold t that was fixed without
looking at the labelled answers, the errors among the N answers at or below t are Binomial(N, risk(t)), so `p_values` is
a valid test of "risk(t) exceeds alpha". The thresholds are tested in rising order, each at the full level delta, and
the walk stops at the first one that is not rejected: to let through a threshold whose risk exceeds alpha, the walk must
reject the *first* such threshold that it meets, which happens with probability at most delta, however many thresholds
there are (Bauer, Statistics in Medicine 10, 1991; Angelopoulos et al., "Learn then Test", arXiv:2110.01052).

The grid comes from outside. It is walked from the first point that lets through enough of the calibration answers.
That looks at scores, never at labels, and is valid where answers beyond the point at which the risk reaches alpha are
wrong at a rate of at least alpha. *Proof.* Let t be the first threshold of the grid with a risk above alpha. Where the
walk begins at t or before, depends on the number of answers up to t alone; given it, their errors are binomial at the
risk of t. Where it begins beyond, it begins at the first threshold with enough answers; the answers up to the threshold
before are wrong at a risk above alpha, the others at a rate of at least alpha, independently. Both times the test that
has to fail for a violation fails with probability at most delta. (Where the score points the wrong way, the excess is
of the order of one grid cell; the tests measure it.)

**Tries on the same labels share delta.** Of several calibrations on the same labels, with other estimators, other
alphas or more answers, one is kept. It is bad with a probability of at most the sum of the tests' levels: the union
bound, for it makes no difference how the tries depend on each other, or which of them is kept. Try k is therefore
tested at level delta x w_k, with w_1 = 9/10 and w_k = 1 / (10 k (k - 1)) from the second on. The weights add up to 1
however many tries there are, so that no number has to be fixed beforehand: with probability at least 1 - delta none of
the thresholds is bad. At alpha = delta = 0.1 the first try takes 23 answers without an error, the second 51, the eighth
82.

The proof takes a list of tries whose order does not depend on the labels. A second try with the estimator that has the
best AUROC on them is in the list only in part; `scripts/check_guarantee.py` simulates it as well. An estimator that was
picked by its AUROC on the labels *before* the first try has used them without being counted, and the promise does not
hold. `--estimator auto` compares on other labels and is a single try.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def p_values(wrong: ArrayLike, answered: ArrayLike, *, alpha: float) -> NDArray[np.float64]:
    """P(at most `wrong` errors in `answered` answers) if the error rate were exactly `alpha`; 1 for no answers.

    Small values speak against "the error rate exceeds alpha". Arrays of counts, one p-value in [0, 1] for each.
    """
    from scipy import special  # slow to import: reading a record must not wait for it

    k, n = np.asarray(wrong, dtype=np.float64), np.asarray(answered, dtype=np.float64)
    inside = (k >= 0) & (k < n)
    tail = special.betaincc(np.where(inside, k, 0) + 1, np.where(inside, n - k, 1), alpha)
    return np.where(inside, tail, np.where(k < 0, 0.0, 1.0))


def upper_bound(wrong: int, answered: int, *, delta: float) -> float:
    """The one-sided Clopper-Pearson bound: the error rate is at most this, with probability at least 1 - delta.

    It is at most alpha exactly where the p-value at alpha is at most delta. 1 where nothing is answered.
    """
    from scipy import special

    if answered == 0 or wrong >= answered:
        return 1.0
    return float(special.betainccinv(wrong + 1, answered - wrong, delta))


def fewest_answers(*, alpha: float, delta: float) -> int:
    """How many answers without one error are needed before the p-value can reach delta: ln(delta) / ln(1 - alpha)."""
    return max(1, math.ceil(min(1e18, math.log(delta) / math.log1p(-alpha)) - 1e-9))


def most_errors(answered: ArrayLike, *, alpha: float, delta: float) -> NDArray[np.intp]:
    """How many errors among `answered` answers still keep the promise; -1 where not even none would. Of any shape."""
    counts = np.asarray(answered, dtype=np.intp)
    low, high = np.full_like(counts, -1), counts.copy()  # the ends: always passes, never passes
    while (high - low > 1).any():
        middle = (low + high) // 2
        passes = p_values(middle, counts, alpha=alpha) <= delta
        low, high = np.where(passes, middle, low), np.where(passes, high, middle)
    return low


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
    fewest = fewest_answers(alpha=alpha, delta=delta)
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
    kept = p_values(errors[first:], answered[first:], alpha=alpha) <= delta
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


_FIRST = 0.9


def share_of(delta: float, number: int) -> float:
    """The level of the try of this number; delta itself where tries are not counted (0)."""
    if number <= 1:
        return delta * (_FIRST if number else 1)
    return delta * (1 - _FIRST) / (number * (number - 1))
