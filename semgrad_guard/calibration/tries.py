"""Tries on the same labels share delta.

Of several calibrations on the same labels, with other estimators, other alphas or more answers, one is kept. It is bad
with a probability of at most the sum of the tests' levels: the union bound, for it makes no difference how the tries
depend on each other, or which of them is kept. Try k is therefore tested at level
delta x w_k, with w_1 = 9/10 and w_k = 1 / (10 k (k - 1)) from the second on. The weights add up to 1 however many tries
there are, so that no number has to be fixed beforehand: with probability at least 1 - delta none of the thresholds is
bad. At alpha = delta = 0.1 the first try takes 23 answers without an error, the second 51, the eighth 82.

The proof takes a list of tries whose order does not depend on the labels. A second try with the estimator that has the
best AUROC on them is in the list only in part; `scripts/check_guarantee.py` simulates it as well. An estimator that was
picked by its AUROC on the labels *before* the first try has used them without being counted, and the promise does not
hold. `--estimator auto` compares on other labels and is a single try.
"""

from __future__ import annotations

_FIRST = 0.9


def share_of(delta: float, number: int) -> float:
    """The level of the try of this number; delta itself where tries are not counted (0)."""
    if number <= 1:
        return delta * (_FIRST if number else 1)
    return delta * (1 - _FIRST) / (number * (number - 1))
