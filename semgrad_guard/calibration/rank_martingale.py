"""Evidence that adds up against "the next answer is like all before it": conformal martingales on ranks.

If nothing has moved, the rank of the next observation among all earlier ones, ties broken at random, is uniform and
independent of the past, whatever the distribution. A bet is a density on [0, 1] that is chosen before the rank is seen:
its product over time is a martingale. Bets begin at many times (`betting.py`).

Fixed memory: the n calibration scores make n + 1 cells with a count each, and a score falls into a cell with the
probability count / total (a Polya urn). A cell is found and counted in O(log n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from semgrad_guard.calibration.betting import MOST, Schedule

Floats = NDArray[np.float64]

_SCHEDULE = Schedule(at_once=0.6, slowness=1000)
_SHIFTS = np.array([0.25, 0.5, 1.0, 2.0, -0.25, -0.5, -1.0, -2.0])[:, None]
_SPREADS = np.array([0.6, 1.6])[:, None]
_BETS = len(_SHIFTS) + len(_SPREADS)
"""The changes that are bet on: of the mean of normal scores, in standard deviations, and of their spread."""
_ODDS = np.array([2.0, 5.0, 20.0])
"""How many times more unscored answers are bet on."""


class RankBets:
    """The evidence in several streams of uniform ranks at once, among `size` calibration scores."""

    def __init__(self, size: int, *, streams: int = 1) -> None:
        self._size, self._n = size + 1, 0
        self._at_once = np.full((_BETS, streams), _SCHEDULE.at_once / _BETS)
        self._later = np.zeros((_BETS, streams))

    def add(self, ranks: Floats) -> Floats:
        """The evidence after one more rank in each stream.

        Bets that began with the first score fade: ranks among a reference that has begun to move itself show only a
        part of the move.
        """
        new, waits = _SCHEDULE.begins(self._n + 1)
        z = special.ndtri(np.clip(ranks, 1e-12, 1 - 1e-12))
        fade = self._size / (self._size + self._n)
        self._at_once = np.minimum(self._at_once * _densities(z, fade), MOST)
        self._later = np.minimum((self._later + new / _BETS) * _densities(z, 1.0), MOST)
        self._n += 1
        return self._at_once.sum(axis=0) + self._later.sum(axis=0) + waits


def _densities(z: Floats, fade: float) -> Floats:
    """Densities of the normal quantile of a rank whose normal score has moved, relative to one that has not."""
    shifts, spreads = _SHIFTS * fade, _SPREADS**fade
    moved = np.exp(shifts * z - shifts**2 / 2)
    return np.concatenate([moved, np.exp((1 - spreads**-2) / 2 * z * z) / spreads])


class ScoreRanks:
    """The ranks of scores among the calibration's and all earlier ones."""

    def __init__(self, scores: Floats, rng: np.random.Generator) -> None:
        breakers = rng.random(len(scores))
        order = np.lexsort((breakers, scores))
        self._edges, self._breakers, self._rng = scores[order], breakers[order], rng
        self._size = self._total = len(scores) + 1
        self._tree = [i & -i for i in range(self._size + 1)]  # a Fenwick tree of ones

    def add(self, score: float) -> float:
        """The rank of a score, in [0, 1]."""
        first, last = (int(np.searchsorted(self._edges, score, side)) for side in ("left", "right"))
        cell = first + int(np.searchsorted(self._breakers[first:last], self._rng.random()))
        below, up_to = self._count(cell), self._count(cell + 1)
        rank = (below + self._rng.random() * (up_to - below)) / self._total
        self._total += 1
        at = cell + 1
        while at <= self._size:
            self._tree[at] += 1
            at += at & -at
        return rank

    def _count(self, cells: int) -> int:
        count = 0
        while cells > 0:
            count += self._tree[cells]
            cells -= cells & -cells
        return count


class UnscoredBets:
    """The evidence that answers without a score have become more frequent than among `n` answers of the calibration."""

    def __init__(self, n: int, unscored: int, rng: np.random.Generator) -> None:
        self._scored, self._unscored, self._rng, self._n = n - unscored, unscored, rng, 0
        self._capital = np.full(len(_ODDS), _SCHEDULE.at_once / len(_ODDS))

    def add(self, is_unscored: bool) -> float:
        """The evidence after one more answer.

        Its rank is drawn between the scored answers and all, or between none and the scored ones, itself included. It
        is bet that the rank lies above the scored answers before it.
        """
        self._n += 1
        new, waits = _SCHEDULE.begins(self._n)
        total = self._scored + self._unscored + 1
        above = (self._unscored + 1) / total
        rates = np.minimum(_ODDS * above, (1 + above) / 2)
        is_above = is_unscored or self._rng.random() * (self._scored + 1) >= self._scored
        self._scored += not is_unscored
        self._unscored += is_unscored
        factors = rates / above if is_above else (1 - rates) / (1 - above)
        self._capital = np.minimum((self._capital + new / len(_ODDS)) * factors, MOST)
        return float(self._capital.sum()) + waits
