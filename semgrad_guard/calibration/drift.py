"""Have the scores moved since calibration? A promise holds only while questions come from the same population.

`DriftMonitor` looks after every score without crying wolf: it bets on the ranks of the scores, and the evidence adds
up. The chance that a monitor *ever* raises a false alarm, however long it runs and however often it reports, is at
most `level`.

A model that stops giving scores moves none, so answers without one are watched in the same way. This second alarm has a
`level` of its own; the chance that either is ever false is at most twice that.

n calibration scores hold at most n s^2 / 2 nats of evidence about a shift of s standard deviations that is there from
the first answer on, so a small calibration never sees a small one: `DriftMonitor.smallest_shift`. A shift that comes
later is compared with all scores before it, and smaller ones are seen.

**Evidence that adds up** against "the next answer is like all before it": conformal martingales on ranks. If nothing
has moved, the rank of the next observation among all earlier ones, ties broken at random, is uniform and
independent of the past, whatever the distribution. A bet is a density on [0, 1] that is chosen before the rank is seen:
its product over time is a martingale. Bets begin at many times (`Schedule`).

Fixed memory: the n calibration scores make n + 1 cells with a count each, and a score falls into a cell with the
probability count / total (a Polya urn). A cell is found and counted in O(log n). A score that rounding takes across a
calibration score moves its rank by one cell, as a tie does.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.promise import MOST, Schedule, Stakes
from semgrad_guard.declared import is_score
from semgrad_guard.errors import CalibrationError, InputError

_NATS_FOR_BETS = 3.0
"""The price of betting on many changes at once."""


class Drift(BaseModel, frozen=True):
    """What a monitor has seen.

    `p_value` in [0, 1] is how likely so large a `statistic`, the largest evidence up to now, is without drift: it holds
    at all times together. `moved` tells whether it is at most `level`. `n` scores were compared; `answers` and
    `unscored` count those with and without a score. `unscored_moved` tells whether the share of the unscored has risen,
    and `unscored_p_value` is that test's, like `p_value`.
    """

    p_value: float = Field(ge=0, le=1)
    moved: bool
    n: int
    statistic: float
    level: float
    answers: int = 0
    unscored: int = 0
    unscored_p_value: float = Field(default=1.0, ge=0, le=1)
    unscored_moved: bool = False

    @property
    def alarm(self) -> bool:
        """Whether anything has moved: the scores, or the share of answers without one."""
        return self.moved or self.unscored_moved


class DriftMonitor:
    """Watches the scores of a running guard, and the answers without one; safe to share between threads.

    A score takes time that grows with the logarithm of the calibration's size, and no memory. An alarm stays until
    `reset`: the remedy is a new calibration.
    """

    def __init__(self, calibration: Calibration, *, level: float = 0.01) -> None:
        if not 0.0 < level < 1.0:
            raise InputError(f"level must lie strictly between 0 and 1, for example 0.01; it is {level!r}.")
        given: Any = calibration
        if not isinstance(given, Calibration):
            raise InputError(
                f"a monitor watches the scores of a Calibration (Calibration.load(path)), not {given!r:.60}"
            )
        if not calibration.scores:
            raise CalibrationError("The calibration holds no scores to watch. Calibrate on answers that have scores.")
        self._scores = np.array(calibration.scores, dtype=np.float64)
        self._n, self._n_unscored, self._level = calibration.n, calibration.n_unscored, level
        self._lock = threading.Lock()
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def smallest_shift(self) -> float:
        """About the smallest shift, in standard deviations of the scores, that is seen where it is there from the first
        answer on."""
        return math.sqrt(2 * (math.log(1 / self._level) + _NATS_FOR_BETS) / len(self._scores))

    def add(self, uncertainty: float | None) -> Drift:
        """Take in one answer's uncertainty (None, NaN or infinite: it has no score) and report.

        Raises:
            InputError: it is not a number.
        """
        scored = is_score(uncertainty)
        with self._lock:
            if is_score(uncertainty):
                rank = self._ranks.add(float(uncertainty))
                self._peak = max(self._peak, float(self._bets.add(np.array([rank]))[0]))
                self._n_scored += 1
            self._n_unscored_seen += not scored
            self._unscored_peak = max(self._unscored_peak, self._unscored.add(not scored))
            return self._report()

    def report(self) -> Drift:
        """The state so far; reading it changes nothing."""
        with self._lock:
            return self._report()

    def reset(self) -> None:
        """Forget all scores, evidence and alarms."""
        with self._lock:
            rng = np.random.default_rng(0)  # breaks ties, and nothing else
            self._ranks, self._bets = ScoreRanks(self._scores, rng), RankBets(len(self._scores))
            self._unscored = UnscoredBets(self._n, self._n_unscored, rng)
            self._peak = self._unscored_peak = 1.0
            self._n_scored = self._n_unscored_seen = 0

    def in_words(self) -> str:
        """The state, and the shifts that this monitor cannot see, for a page."""
        found, n = self.report(), len(self._scores)
        seen = [
            *(["the scores are no longer those of the calibration"] if found.moved else []),
            *(["more answers than at calibration have no score"] if found.unscored_moved else []),
        ]
        state = f"Drift alarm: {', and '.join(seen)}. Calibrate again" if seen else "No drift is seen"
        return (
            f"{state} ({found.answers} answers, {found.unscored} of them without a score). With {n} calibration scores,"
            f" a shift that was there from the first answer on is seen from about {self.smallest_shift:.1f} standard "
            "deviations on; a shift that comes later is seen sooner."
        )

    def _report(self) -> Drift:
        return Drift(
            p_value=1 / self._peak,
            moved=self._peak >= 1 / self._level,
            n=self._n_scored,
            statistic=self._peak,
            level=self._level,
            answers=self._n_scored + self._n_unscored_seen,
            unscored=self._n_unscored_seen,
            unscored_p_value=1 / self._unscored_peak,
            unscored_moved=self._unscored_peak >= 1 / self._level,
        )


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
        from scipy import special

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
        self._scored, self._unscored, self._rng = n - unscored, unscored, rng
        self._stakes = Stakes(_SCHEDULE, len(_ODDS))

    def add(self, is_unscored: bool) -> float:
        """The evidence after one more answer.

        Its rank is drawn between the scored answers and all, or between none and the scored ones, itself included. It
        is bet that the rank lies above the scored answers before it.
        """
        total = self._scored + self._unscored + 1
        above = (self._unscored + 1) / total
        rates = np.minimum(_ODDS * above, (1 + above) / 2)
        is_above = is_unscored or self._rng.random() * (self._scored + 1) >= self._scored
        self._scored += not is_unscored
        self._unscored += is_unscored
        return float(self._stakes.add(rates / above if is_above else (1 - rates) / (1 - above)))
