"""Exact binomial statements about an error rate: p-values, upper bounds, and how many answers a promise needs.

Every number here is exact for k errors in n independent answers (Clopper & Pearson, "The use of confidence or
fiducial limits", Biometrika 26, 1934); nothing is approximated by a normal distribution.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special


def p_values(wrong: ArrayLike, answered: ArrayLike, *, alpha: float) -> NDArray[np.float64]:
    """P(at most `wrong` errors in `answered` answers) if the error rate were exactly `alpha`; 1 for no answers.

    Small values speak against "the error rate exceeds alpha". Arrays of counts, one p-value in [0, 1] for each.
    """
    k, n = np.asarray(wrong, dtype=np.float64), np.asarray(answered, dtype=np.float64)
    inside = (k >= 0) & (k < n)
    tail = special.betaincc(np.where(inside, k, 0) + 1, np.where(inside, n - k, 1), alpha)
    return np.where(inside, tail, np.where(k < 0, 0.0, 1.0))


def upper_bound(wrong: int, answered: int, *, delta: float) -> float:
    """The one-sided Clopper-Pearson bound: the error rate is at most this, with probability at least 1 - delta.

    It is at most alpha exactly where the p-value at alpha is at most delta. 1 where nothing is answered.
    """
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
