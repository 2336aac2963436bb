"""Exact tests of an error rate, and walks over thresholds that stop at the first test that fails.

**Binomial statements** are exact for k errors in n independent answers (Clopper & Pearson, "The use of confidence or
fiducial limits", Biometrika 26, 1934); nothing is approximated by a normal distribution.

**Gates** test "the K most certain answers" at counts K that no label chooses, from few answers to many.

The answers are sorted by score. K_e is the smallest count at which e errors still pass the exact binomial test of "the
error rate exceeds alpha" at level delta. The walk begins early (`START`), accepts gates while they pass, and stops at
the first that fails. The threshold lies half-way between the last score at the last accepted gate and the next one
(`between`). No answer is spent on a grid, and there is no seed.

**Assumption**: R(t), the error rate of the answers with a score of at most t, *crosses alpha once*: there is a t* with
R <= alpha up to t* and R > alpha beyond it.

**Theorem.** The delivered threshold has R > alpha with probability at most delta.

*Proof.* Let scores be continuous, so that R(t*) = alpha. M answers of n have scores up to t*. The threshold of a gate
lies below the score of the answer after it, so that of a gate with K < M is at most t*: it does no harm. Let J be the
first gate with K_J >= M; to violate, the walk has to accept J. Condition on M and, if K_J < n, on the score t' of the
answer after the gate. The M answers up to t* are independent draws from S <= t*, so their errors are Bin(M, alpha). The
next K_J - M, if any, are independent draws from t* < S < t'. They are wrong at a rate r, and R(t') is a weighted mean
of alpha and r. R(t') > alpha, so r > alpha. The errors at the gate are therefore stochastically at least Bin(K_J,
alpha), and J passes with probability at most delta. (K_J = n: condition on M alone.) Average over both. It makes no
difference where between the two scores a threshold lies, nor how far above all of them.

*Ties*: only whole blocks of scores that are equal, but for rounding, can be delivered, so a gate inside a block moves
up to its end. Whether the block in which R exceeds alpha has a gate then depends on the number of answers in it, and
the errors at the gate are not exactly binomial. In 218 populations of three blocks that were drawn to exploit this,
violations stayed at .092 or less for delta = .1.

**Looking ahead.** From `ENOUGH_TO_LOOK_AHEAD` answers on, a gate that fails is forgiven where a later gate passes
clearly: gate J passes at level `OWN` x delta by itself, or where a later gate k has at most b_k errors. The b_k belong
to the largest common level at which independent errors at rate alpha pass by one of these ways with probability delta,
computed from their joint law. A few confident mistakes then do not end the walk. This takes a stronger assumption:
every answer beyond t* is wrong at a rate of at least alpha.

**The reachable promise.** Where no gate is accepted, the answers of the first one, K of them, are promised at alpha' =
max(alpha, the Clopper-Pearson bound on their errors). Both promises together fail with probability at most delta, if R
crosses alpha once and does not fall beyond.

*Proof.* Let t' be the score of the answer after the first gate, and r = R(t'). Given t', the K errors are Bin(K, r),
and the gate's threshold t lies below t', so that R(t) is at most max(alpha, r). Let t' <= t*, so that K < M: alpha' is
never too small, and the walk fails with probability at most delta, given M. Let t' > t*, so that r > alpha. The walk
fails only if the first gate passes, so that the bound is at most alpha; alpha' fails only if the bound is below r. Both
mean that the bound at level delta is below r: probability at most delta, given t'. Which of the two cases it is,
depends on M alone. (K = n: the same for r = R(infinity).) The same holds for grades by hand, whose draws are from the
surest answers. That it is offered only below the error rate of the labels withholds more, and breaks nothing.

*Looking ahead* lets the first gate pass by later ones as well. Errors at a rate of at least alpha forgive it with a
probability of at most q, by their joint law, so the bound is taken at level delta - q. Then, if the bound is below r
wherever the gate passes by itself, the probabilities add up to delta; if not, the walk's own event is all there is.

Not valid, however natural, for they choose by the labels (violations in `docs/results/reachable.md`): the smallest of
several alphas that some gate allows, the smallest that the first gate allows, the best of several first gates, a bare
threshold with at most a share alpha of errors among the labels.

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
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Procedure = Literal["gates", "look-ahead"]

_INDEPENDENT = "calibration questions and later questions are independent draws from one population, and "
_CROSSES_ONCE = (
    _INDEPENDENT + "as the threshold rises, the error rate of the answers up to it exceeds alpha from one point on"
)
_WORSE_BEYOND = (
    _INDEPENDENT + "beyond the threshold at which the error rate reaches alpha, all answers are wrong at a rate of at "
    "least alpha"
)
ASSUMPTIONS: dict[Procedure, str] = {"gates": _CROSSES_ONCE, "look-ahead": _WORSE_BEYOND}
"""The assumption of each procedure, in one sentence."""

START = 0.3
"""The share of the answers that the first gate holds, at least; in large sets `FEWEST_TIMES` the fewest are enough.

An early start finds a threshold where few answers are good enough, and loses some coverage where many are. With
alpha = delta = 0.1, a base error of 0.48 and AUROC 0.70 (alpha = 0.3), 1,000 labels find a threshold in 87 of 100 sets
instead of 32; with a base error of 0.2 and AUROC 0.8 the coverage is 0.597 instead of 0.603.
"""

FEWEST_TIMES = 6
"""The first gate needs no more than this many times the fewest answers that could keep the promise."""

OWN = 0.9
"""The part of delta at which a gate passes by itself where later gates may forgive it."""

ENOUGH_TO_LOOK_AHEAD = 150
"""Scored answers from which looking ahead costs at most .02 of coverage; below, it costs more."""

ROUNDING = 1e-5
"""Scores that differ by less, relatively, count as equal: in float32 two exact computations of one score differ by 1e-7
on one processor, and by some 3e-6 from one to the next (the median of 1,293 answers)."""

BEYOND = 1 / 64
"""Where there is no next score, one is assumed this much above (relative to the greatest): half of it is the rounding
of bfloat16."""

MOST_GATES = 32
"""Gates are thinned to so many: any spacing is valid, and the joint law takes time that grows with the cube."""

_BISECTIONS = 12

_FIRST_TRY = 0.9
"""The part of delta that is the first try's."""


@dataclass(frozen=True)
class Walk:
    """The gates of one set of answers, by their thresholds, and the last one that was accepted (None: none was).

    `answered` and `wrong` count the answers at the last accepted gate, or at the first gate where none was accepted; 0
    where the set is too small for any gate. `spare` is the level of the bound by which the first gate's answers are
    promised where no gate was accepted; 0 where there is no proof.
    """

    procedure: Procedure
    thresholds: tuple[float, ...]
    accepted: int | None
    answered: int
    wrong: int
    spare: float = 0.0

    @property
    def threshold(self) -> float | None:
        """That of the last accepted gate."""
        return None if self.accepted is None else self.thresholds[self.accepted]


def walk(
    scores: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    *,
    alpha: float,
    delta: float,
    known: NDArray[np.float64] | None = None,
) -> Walk:
    """Walk the gates of scored answers, `wrong` or not.

    Thresholds lie between the `known` scores, those of the answers among them; by default these alone.
    """
    order = np.argsort(scores, kind="stable")
    errors = np.cumsum(wrong[order], dtype=np.intp)
    return walk_sorted(scores[order], errors, alpha=alpha, delta=delta, known=known)


def walk_sorted(
    scores: NDArray[np.float64],
    errors: NDArray[np.intp],
    *,
    alpha: float,
    delta: float,
    start: float = START,
    ahead: bool = True,
    known: NDArray[np.float64] | None = None,
) -> Walk:
    """Walk the gates of answers by their rising scores; `errors` counts the wrong answers up to each of these.

    `start` is the share of the answers that the first gate holds, at least. Without `ahead` no gate is forgiven.
    """
    n = len(scores)
    ends = _ends(scores) + 1

    first = first_count(n, alpha=alpha, delta=delta, start=start)

    def gates(level: float) -> NDArray[np.intp]:
        return np.unique(ends[np.searchsorted(ends, gate_counts(n, alpha=alpha, level=level, first=first))])

    procedure: Procedure
    spare = delta
    if ahead and n >= ENOUGH_TO_LOOK_AHEAD:
        procedure, counts = "look-ahead", gates(OWN * delta)
        at, limits = errors[counts - 1], _limits(tuple(counts.tolist()), alpha, delta)
        accepted = last_in_a_row(np.array([(at[gate:] <= most).any() for gate, most in enumerate(limits)], np.bool_))
        if accepted is None and len(counts):
            spare -= _probability(counts.tolist(), np.append(-1, limits[0][1:]), alpha)
    else:
        procedure, counts = "gates", gates(delta)
        accepted = last_in_a_row(p_values(errors[counts - 1], counts, alpha=alpha) <= delta)
    if not len(counts):
        return Walk(procedure, (), None, 0, 0)
    at = int(counts[accepted or 0])
    thresholds = between(scores[counts - 1], scores if known is None else known)
    return Walk(procedure, tuple(thresholds.tolist()), accepted, at, int(errors[at - 1]), spare)


def leveled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores, of any shape, where those that only rounding tells apart are all the greatest of them."""
    order = np.argsort(scores, axis=None)
    rising = scores.ravel()[order]
    ends, same = _ends(rising), np.empty_like(rising)
    same[order] = rising[ends[np.searchsorted(ends, np.arange(len(rising)))]]
    return same.reshape(scores.shape)


def _ends(rising: NDArray[np.float64]) -> NDArray[np.intp]:
    """The last place of each block of scores that only rounding tells apart."""
    below, above, shrunk = rising[:-1], rising[1:], 1 - ROUNDING
    is_next = np.where(above > 0, shrunk * above > below, above > shrunk * below)
    return np.append(np.flatnonzero(is_next), len(rising) - 1)


def between(scores: NDArray[np.float64], known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Thresholds that let through the same of the `known` scores as these, some of them, do.

    No decision then hangs on the equality of two scores. Each lies half-way to the next greater known score, in the
    logarithm where both are positive, or above all of them (`BEYOND`). Infinite scores are none.
    """
    rising = np.sort(known[np.isfinite(known)], axis=None)
    beyond = min(sys.float_info.max, float(rising[-1]) + BEYOND * (float(np.abs(rising).max()) or 1.0))
    after = np.append(rising, beyond)[np.searchsorted(rising, scores, side="right")]
    roots: NDArray[np.float64] = np.sqrt(np.abs(scores)) * np.sqrt(np.abs(after))
    middle = np.where(scores > 0, roots, scores / 2 + after / 2)
    return np.where((scores <= middle) & (middle < after), middle, scores)


def first_count(n: int, *, alpha: float, delta: float, start: float = START) -> float:
    """The number of answers at the first gate, at least."""
    return min(start * n, FEWEST_TIMES * fewest_answers(alpha=alpha, delta=delta))


@lru_cache(maxsize=256)
def gate_counts(n: int, *, alpha: float, level: float, first: float) -> NDArray[np.intp]:
    """The counts of n answers at which 0, 1, 2 ... errors begin to pass at `level`, rising; at most `MOST_GATES`.

    They begin at the first count of at least `first`, or at the largest where none is so large, and end at n.
    """
    allowed = most_errors(np.arange(n + 1), alpha=alpha, delta=level)
    counts = np.flatnonzero(np.diff(allowed)) + 1  # one more answer allows one more error, or none
    if len(counts):
        counts = np.union1d(counts[counts >= min(first, counts[-1])], [n])
    return counts[np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MOST_GATES)).round().astype(np.intp))]


@lru_cache(maxsize=32)
def _limits(counts: tuple[int, ...], alpha: float, delta: float) -> tuple[NDArray[np.intp], ...]:
    """For each gate the most errors by which it passes itself, and the most at each later gate that forgive it."""
    most = most_errors(counts, alpha=alpha, delta=delta).tolist()
    tails = [p_values(range(k + 1), n, alpha=alpha) for n, k in zip(counts, most, strict=True)]
    return tuple(_limits_of(counts[gate:], tails[gate:], alpha, delta) for gate in range(len(counts)))


def _limits_of(
    counts: Sequence[int], tails: Sequence[NDArray[np.float64]], alpha: float, delta: float
) -> NDArray[np.intp]:
    """The limits of the first of `counts`: the largest common level of later gates that keeps to delta in all.

    `tails` are the p-values of 0, 1, 2 ... errors at each count, as far as they are at most delta.
    """

    def limits(level: float) -> NDArray[np.intp]:
        levels = [OWN * delta, *[level] * (len(counts) - 1)]
        return np.array([np.searchsorted(*both, side="right") - 1 for both in zip(tails, levels, strict=True)])

    if len(counts) == 1:
        return np.array([len(tails[0]) - 1])
    low, high = 0.0, OWN * delta
    found, beyond = limits(low), limits(high)
    for _ in range(_BISECTIONS):
        if (found == beyond).all():
            break
        middle = (low + high) / 2
        tried = limits(middle)
        if _probability(counts, tried, alpha) <= delta:
            low, found = middle, tried
        else:
            high, beyond = middle, tried
    return found


def _probability(counts: Sequence[int], limits: NDArray[np.intp], alpha: float) -> float:
    """P(at some count at most its limit of errors) for independent errors at rate alpha, exact: a walk over counts."""
    most = int(limits.max()) + 1  # with more errors than any limit nothing can happen any more
    alive, before, happened = np.ones(1), 0, 0.0
    for count, limit in zip(counts, limits.tolist(), strict=True):
        alive = np.convolve(alive, _mass(count - before, alpha)[:most])[:most]
        happened += float(alive[: limit + 1].sum())
        alive[: limit + 1] = 0.0
        before = count
    return happened


@lru_cache(maxsize=4096)
def _mass(n: int, alpha: float) -> NDArray[np.float64]:
    """P(k errors in n answers) at rate alpha, for k = 0 .. n."""
    return np.diff(p_values(np.arange(-1, n + 1), n, alpha=alpha))


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


def in_a_row(passes: NDArray[np.bool_]) -> NDArray[np.intp]:
    """How many tests pass before the first that fails, along the last axis."""
    return np.logical_and.accumulate(passes, axis=-1).sum(axis=-1)


def last_in_a_row(passes: NDArray[np.bool_]) -> int | None:
    """The index of the last test before the first that fails; None where the first fails, or there is none."""
    row = int(in_a_row(passes))
    return row - 1 if row else None


def share_of(delta: float, number: int) -> float:
    """The level of the try of this number; delta itself where tries are not counted (0)."""
    if number <= 1:
        return delta * (_FIRST_TRY if number else 1)
    return delta * (1 - _FIRST_TRY) / (number * (number - 1))
