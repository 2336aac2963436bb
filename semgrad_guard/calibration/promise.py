"""The promise of a calibration: in words, with a report from its record alone, and whether it still holds.

The report is for the terminal, for the server's page and for its models.

Does a promise still hold? Grades of delivered answers that were drawn at random, with a look after each of them.

The range of the error rate has two ends. *Low*: every rate has a betting e-process against "the error rate is at most
this". Each bet is the likelihood ratio of a higher rate: a supermartingale for every sequence of rates up to this one,
also one that changes with what was seen. A rate whose evidence ever reaches 1 / delta is refuted for good, and the
range begins above all of these. *High*: that of a confidence sequence, Robbins' beta-binomial mixture, which holds at
all times together where the rate does not change.

*broken*: the range begins above alpha. A promise that holds is ever called so with a probability of at most delta, in
the whole life of a calibration. *kept*: the range ends at or below alpha. Where it may be both, "broken" wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.calibration.planning import plan
from semgrad_guard.calibration.thresholds import upwards

_AUTO = "the best on a part of the labels, and with few labels one that costs nothing, whatever its AUROC"


def report(calibration: Calibration) -> dict[str, str]:
    """Sentences by their subject: promise, assumption, effect, prompts, labels, chance, scores; those that apply."""
    sentences = {"promise": promise(calibration), "assumption": calibration.assumption}
    if calibration.effect is not None and calibration.threshold is not None:
        sentences["effect"] = str(calibration.effect)
    if calibration.shape is not None:
        sentences["prompts"] = calibration.shape.covers
    if (part := calibration.by_hand) is not None:
        sentences["labels"] = (
            f"{part.count} graded by hand, a random part of the surest {part.share:.1%} ({part.drawn_from} answers)"
        )
    elif calibration.auroc is not None and calibration.n_tested and calibration.sentences is None:
        error = (calibration.n_wrong - calibration.n_unscored_wrong) / calibration.n_tested
        level = calibration.level
        chance = plan(calibration.n_tested, error=error, auroc=calibration.auroc, alpha=calibration.alpha, delta=level)
        sentences["chance"] = (
            f"with {error:.0%} of the scored answers wrong and an AUROC of {calibration.auroc:.2f}, {chance}"
        )
    if calibration.aurocs:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in calibration.aurocs.items() if value is not None)
        text = f"AUROC {figures}" if figures else "no AUROC: all answers are right, or all wrong"
        taken = f"; --estimator auto takes {calibration.auto}: {_AUTO}" if calibration.auto else ""
        sentences["scores"] = text + taken
    return sentences


def promise(calibration: Calibration) -> str:
    """The promise in one sentence, whether or not a threshold keeps it."""
    to = {"keep": " to traffic like this", "once": " to distinct questions", None: ""}[calibration.copies]
    rate = f"{100 * calibration.alpha:g}%" if calibration.requested is None else upwards(calibration.alpha)
    sure = f"with {100 * (1 - calibration.delta):g}% probability"
    text = f"Among the answers let through{to}, at most {rate} are wrong, {sure}"
    if calibration.requested is not None:
        text += f" ({_requested(calibration.requested)})"
    if calibration.sentences is not None:
        delivered = f"from which something is delivered{to}"
        text = {
            "sentence": f"Take an answer {delivered}, and one of its delivered sentences at random: it is wrong at a "
            f"rate of at most {rate}, {sure}",
            "answer": f"Of the answers {delivered}, at most {rate} hold a wrong sentence, {sure}",
        }[calibration.sentences.promise]
    if calibration.tries < 2:
        return f"{text}."
    return (
        f"{text} for all {calibration.tries} tries on these labels together (this one has level "
        f"{calibration.level:.2g})."
    )


def _requested(alpha: float) -> str:
    return f"{100 * alpha:g}% was asked for, and these labels do not support it"


def shortfall(calibration: Calibration, *, cut: str = "") -> str:
    """What helps where no threshold keeps the promise, in order of effect: the reachable one, answers that were `cut`
    off, and the labels that the reason names."""
    return " ".join(filter(None, (offer(calibration), cut, calibration.reason)))


def offer(calibration: Calibration) -> str:
    """What the labels support where they do not support the promise that was asked for; empty where there is none."""
    if (found := calibration.reachable) is None:
        return ""
    counts = found.in_words(calibration.n_tested, requested=calibration.alpha)
    return f"{counts} To deliver these: --on-no-threshold reachable."


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

_SCHEDULE = Schedule(at_once=0.5, slowness=200)
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
        wish = "" if self.requested_alpha is None else f" ({_requested(self.requested_alpha)})"
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
        self._stakes = Stakes(_SCHEDULE, len(_RATES), streams)

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
