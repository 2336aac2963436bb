"""Does a promise still hold? `PromiseMonitor` looks at grades, `DriftMonitor` at scores, which need none.

**By grades** of delivered answers that were drawn at random, with a look after each of them.

The range of the error rate has two ends. *Low*: every rate has a betting e-process against "the error rate is at most
this". Each bet is the likelihood ratio of a higher rate: a supermartingale for every sequence of rates up to this one,
also one that changes with what was seen. A rate whose evidence ever reaches 1 / delta is refuted for good, and the
range begins above all of these. *High*: that of a confidence sequence, Robbins' beta-binomial mixture, which holds at
all times together where the rate does not change.

*broken*: the range begins above alpha. A promise that holds is ever called so with a probability of at most delta, in
the whole life of a calibration. *kept*: the range ends at or below alpha. Where it may be both, "broken" wins.

**Without grades.** Have the scores moved since calibration? A promise holds only while questions come from the same
population.

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
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration.calibration_record import Calibration, in_place_of
from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.declared import is_score
from semgrad_guard.errors import CalibrationError, InputError

Floats = NDArray[np.float64]

MOST = 1e100
"""The most that a bet may win: far beyond any alarm, and small enough for further products."""


@dataclass(frozen=True)
class Schedule:
    """When bets begin: at many times, so that a long time without a change costs nothing that was not already bet.

    `at_once` is the share of the capital that bets from the first observation on. The rest begins later, some of it
    with every observation: half of it has begun by observation `slowness`, so changes at about that time are noticed
    soonest. The shares add up to one, so the whole is a supermartingale wherever each bet is one. By Ville's inequality
    it ever reaches 1 / level with a probability of at most `level`, however often one looks.
    """

    at_once: float
    slowness: float

    def begins(self, k: int) -> tuple[float, float]:
        """The share whose bets begin with observation k = 1, 2 ..., without `at_once`; and the one that waits after it.

        The shares are at_once + sum of (1 - at_once) b / ((k + b - 1) (k + b)) = 1, with the slowness b.
        """
        waits = (1 - self.at_once) * self.slowness / (k + self.slowness)
        return waits / (k + self.slowness - 1), waits


class Stakes:
    """Bets that begin by a schedule, all at the same shares: an array of bets, or of bets x streams."""

    def __init__(self, schedule: Schedule, *shape: int) -> None:
        self._schedule, self._n = schedule, 0
        self._capital = np.full(shape, schedule.at_once / shape[0])

    def add(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """The evidence in each stream after one more observation, by which each bet wins or loses so many times."""
        self._n += 1
        new, waits = self._schedule.begins(self._n)
        self._capital = np.minimum((self._capital + new / len(self._capital)) * factors, MOST)
        return self._capital.sum(axis=0) + waits


State = Literal["kept", "unknown", "broken"]

_OF_GRADES = Schedule(at_once=0.5, slowness=200)
_RATES = np.array([1.25, 1.5, 2.0, 3.0, 5.0])
"""The error rates that are bet on, as multiples of the one that they are bet against."""
_STEP = 0.02
"""Between the logarithms of two rates that may be refuted."""
_PRIOR = (0.5, 4.5)
"""Of the mixture: a beta distribution."""
_HALVINGS = 60


class PromiseState(BaseModel, frozen=True):
    """Whether the promise of `alpha` holds, by the `labels` of answers drawn at random, of which `wrong` were wrong.

    `requested_alpha` is the wished one, where the calibration's labels did not support it.

    The error rate lies at or above `low`, and at or below `high`, each with probability 1 - delta at all looks
    together. `ungraded` answers were drawn, and are not graded yet.
    """

    calibration_id: str | None = None
    state: State
    alpha: float
    requested_alpha: float | None = None
    delta: float
    labels: int
    wrong: int
    low: float
    high: float
    ungraded: int = 0

    def __str__(self) -> str:
        wish = "" if self.requested_alpha is None else f" ({in_place_of(self.requested_alpha)})"
        promised = f"Promised: at most {100 * self.alpha:.4g}% of the answers let through are wrong{wish}."
        missing = f" {self.ungraded} drawn answers are not graded yet: if these are the hard ones, the grades flatter."
        missing = missing if self.ungraded else ""
        if not self.labels:
            return f"Unknown: no answer that was drawn at random is graded yet. {promised}{missing}"
        advice = {
            "kept": "",
            "unknown": " More grades of answers drawn at random will tell.",
            "broken": " Lower the threshold, or calibrate again.",
        }
        above = "" if self.low == 0 else f"above {self.low:.1%} and "
        return (
            f"{self.state.capitalize()}: of {self.labels} answers drawn at random {self.wrong} were wrong, so the error"
            f" rate of those let through is {above}at most {self.high:.1%} ({100 * (1 - self.delta):.4g}% confidence "
            f"each, at every look). {promised}{advice[self.state]}{missing}"
        )


class Bets:
    """The evidence against error rates up to `alpha`: one for all streams of grades, or one for each."""

    def __init__(self, alpha: float | NDArray[np.float64], *, streams: int = 1) -> None:
        rates = np.minimum(_RATES[:, None] * alpha, (1 + alpha) / 2)
        self._wrong, self._right = rates / alpha, (1 - rates) / (1 - alpha)
        self._stakes = Stakes(_OF_GRADES, len(_RATES), streams)

    def add(self, wrong: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The evidence after one more grade in each stream."""
        return self._stakes.add(np.where(wrong, self._wrong, self._right))


class PromiseMonitor:
    """Watches the promise (alpha, delta) of one calibration; `add` every grade of an answer drawn at random."""

    def __init__(self, alpha: float, delta: float) -> None:
        self.alpha, self.delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
        steps = np.arange(math.ceil(math.log(0.01) / _STEP), math.ceil(-math.log(self.alpha) / _STEP))
        self._rates = self.alpha * np.exp(_STEP * steps)  # alpha is one of them, exactly
        self._bets, self._refuted = Bets(self._rates, streams=len(steps)), np.zeros(len(steps), dtype=bool)
        self._labels = self._wrong = 0

    def add(self, wrong: bool) -> None:
        """Take in one grade."""
        self._labels += 1
        self._wrong += bool(wrong)
        self._refuted |= self._bets.add(np.full(len(self._rates), bool(wrong))) >= 1 / self.delta

    def report(
        self, *, calibration_id: str | None = None, requested_alpha: float | None = None, ungraded: int = 0
    ) -> PromiseState:
        """The state with its numbers, and further facts about the promise."""
        low, high = self.interval()
        return PromiseState(
            calibration_id=calibration_id,
            requested_alpha=requested_alpha,
            state="broken" if low > self.alpha else "kept" if high <= self.alpha and self._labels else "unknown",
            alpha=self.alpha,
            delta=self.delta,
            labels=self._labels,
            wrong=self._wrong,
            low=low,
            high=high,
            ungraded=ungraded,
        )

    def interval(self) -> tuple[float, float]:
        """The lowest and the highest error rate that the grades do not exclude; never an empty range."""
        refuted = self._rates[self._refuted]
        low = float(np.nextafter(refuted.max(), 1)) if len(refuted) else 0.0
        seen = self._wrong / self._labels if self._labels else 0.5
        return low, max(low, self._end(seen, 1.0))

    def _end(self, inside: float, outside: float) -> float:
        """The end of the interval between a rate in it and one beyond it, or at most at it."""
        if not self._excludes(outside):
            return outside
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if self._excludes(middle) else (middle, outside)
        return outside

    def _excludes(self, rate: float) -> bool:
        """Whether the mixture is 1 / delta times as likely as this rate, or more."""
        right = self._labels - self._wrong
        if (rate <= 0 and self._wrong) or (rate >= 1 and right):
            return True
        is_certain = rate in (0.0, 1.0)
        likelihood = 0.0 if is_certain else self._wrong * math.log(rate) + right * math.log1p(-rate)
        a, b = _PRIOR
        mixture = _log_beta(a + self._wrong, b + right) - _log_beta(a, b)
        return mixture - likelihood >= -math.log(self.delta)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


# Without grades.

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


_OF_SCORES = Schedule(at_once=0.6, slowness=1000)
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
        self._at_once = np.full((_BETS, streams), _OF_SCORES.at_once / _BETS)
        self._later = np.zeros((_BETS, streams))

    def add(self, ranks: Floats) -> Floats:
        """The evidence after one more rank in each stream.

        Bets that began with the first score fade: ranks among a reference that has begun to move itself show only a
        part of the move.
        """
        from scipy import special

        new, waits = _OF_SCORES.begins(self._n + 1)
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
        self._stakes = Stakes(_OF_SCORES, len(_ODDS))

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
