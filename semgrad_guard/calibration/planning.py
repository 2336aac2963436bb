"""`plan`: the effect to expect of so many labels, before they are labelled, or where a set found no threshold.

The scores of right and of wrong answers are taken to be normal, so far apart that their AUROC is the given one. The
errors between two gates are drawn as binomial, at the rate of the answers there. Gates do not look ahead here, which
changes coverage by .02 at most. Real sets differ more, by their scores' distribution above all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.errors import CalibrationError

SIZES = (50, 100, 150, 200, 300, 500, 700, 1000, 2000, 5000)
"""Numbers of labels among which `enough` looks."""

_SETS = 1000
_OFTEN = 0.9
_LIMIT = 1e-6
_OTHERWISE = "promise less (a larger alpha), or use a model or an estimator that tells right from wrong better"


@dataclass(frozen=True)
class Plan:
    """The effect to expect of `n` labels where `error` of the answers are wrong and the scores have this `auroc`.

    `found` is the chance of a threshold, `coverage` the mean share that is delivered (0 without a threshold), and
    `withheld` the least share that any guard has to withhold: (error - alpha) / (1 - alpha). All are in [0, 1]. Shares
    are those of the `unit`; by sentence, `n` counts the answers whose sentences have labels.
    """

    n: int
    alpha: float
    delta: float
    error: float
    auroc: float
    found: float
    coverage: float
    unit: Literal["answers", "sentences"] = "answers"

    @property
    def withheld(self) -> float:
        """The least share that any guard has to withhold, were it to know every wrong answer; 0 by sentence, where the
        promise is not about their share."""
        return 0.0 if self.unit == "sentences" else max(0.0, (self.error - self.alpha) / (1 - self.alpha))

    def __str__(self) -> str:
        labels = "labels" if self.unit == "answers" else "answers with labels"
        return (
            f"{self.n} {labels} find a threshold in {self.found:.0%} of such sets, and deliver {self.coverage:.0%} of "
            f"the {self.unit} on average"
        )


@lru_cache(maxsize=64)
def plan(n: int, *, error: float, auroc: float, alpha: float, delta: float) -> Plan:
    """The effect to expect of n labels, by 1,000 simulated sets (the same ones every time).

    Raises:
        CalibrationError: a number is out of its range.
    """
    if n < 1 or not (0 <= error <= 1 and 0 <= auroc <= 1):
        raise CalibrationError(
            f"A plan takes at least one label, and an error rate and an AUROC in [0, 1], not {n}, {error} and {auroc}."
        )
    first = gates.first_count(n, alpha=read_rate(alpha, "alpha"), delta=read_rate(delta, "delta"))
    counts = gates.gate_counts(n, alpha=alpha, level=delta, first=first)
    if not len(counts):
        return Plan(n, alpha, delta, error, auroc, 0.0, 0.0)
    steps = np.diff(counts, prepend=0)
    rates = np.diff(wrong_up_to(counts / n, error, auroc), prepend=0.0) * n / steps
    errors = np.random.default_rng(n).binomial(steps, rates.clip(0, 1), size=(_SETS, len(counts))).cumsum(axis=1)
    accepted = gates.in_a_row(errors <= gates.most_errors(counts, alpha=alpha, delta=delta))
    delivered = np.append(0, counts)[accepted]
    return Plan(n, alpha, delta, error, auroc, float((accepted > 0).mean()), float(delivered.mean()) / n)


def enough(*, error: float, auroc: float, alpha: float, delta: float) -> Plan | None:
    """The fewest labels, of `SIZES`, from which on nine of ten sets find a threshold; None where no number does."""
    return enough_of(partial(plan, error=error, auroc=auroc, alpha=alpha, delta=delta))


def enough_of(planned: Callable[[int], Plan]) -> Plan | None:
    """The same by plans of any kind. More labels find a threshold more often, so a few of the plans are made."""
    planned = cache(planned)
    index = bisect_left(SIZES, _OFTEN, key=lambda n: planned(n).found)
    return planned(SIZES[index]) if index < len(SIZES) else None


def advice(scores: NDArray[np.float64], correct: NDArray[np.bool_], *, alpha: float, delta: float) -> str:
    """The labels that it takes, by the error rate and the AUROC of scored answers with which no threshold was found."""
    error, quality = float((~correct).mean()), auroc(scores, correct)
    if quality is None:
        return of_one_kind(error, gates.fewest_answers(alpha=alpha, delta=delta))
    setting = {"error": error, "auroc": quality, "alpha": alpha, "delta": delta}
    return in_words(plan(len(scores), **setting), enough(**setting))


def of_one_kind(error: float, fewest: int) -> str:
    """The advice where all are right, or all wrong."""
    few = f"If all stay right, {fewest} answers suffice; promise less (a larger alpha or delta) to need fewer."
    return few if error == 0 else f"All are wrong, so no number of labels helps: {_OTHERWISE}."


def in_words(here: Plan, better: Plan | None) -> str:
    """The advice by the plan of the labels that there are, and of those that would be enough."""
    least = f"Any guard has to withhold at least {here.withheld:.0%} of such {here.unit}. " if here.withheld else ""
    by = " --by sentence" if here.unit == "sentences" else ""
    summary = f"With {here.error:.0%} of the scored {here.unit} wrong and an AUROC of {here.auroc:.2f}, {here}"
    if better is None:
        return f"{least}{summary}; with {SIZES[-1]} labels it is rare as well: {_OTHERWISE}."
    more = f"; with {better.n} it is {better.found:.0%}" if better.n > here.n else ""
    return f"{least}{summary}{more}. Or {_OTHERWISE}. `semgrad-guard plan{by}` computes this for other numbers."


def auroc(scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> float | None:
    """P(a wrong answer is less certain than a right one), ties counting half; None where all are of one kind."""
    right, wrong = np.sort(scores[correct]), scores[~correct]
    if not (len(right) and len(wrong)):
        return None
    below = np.searchsorted(right, wrong, side="left") + np.searchsorted(right, wrong, side="right")
    return float(below.sum() / (2 * len(right) * len(wrong)))  # whole numbers: rounded once


def shift(auroc: float) -> float:
    """The distance of two normal distributions with this AUROC, in standard deviations."""
    from scipy import special

    return math.sqrt(2) * float(special.ndtri(min(max(auroc, _LIMIT), 1 - _LIMIT)))


def wrong_up_to(quantiles: NDArray[np.float64], error: float, auroc: float) -> NDArray[np.float64]:
    """The share of all answers that are wrong and among the most certain ones, by the share that these are."""
    from scipy import special

    apart = shift(auroc)
    at = np.linspace(min(0.0, apart) - 8, max(0.0, apart) + 8, 4001)
    wrong: NDArray[np.float64] = error * special.ndtr(at - apart)
    scored: NDArray[np.float64] = wrong + (1 - error) * special.ndtr(at)
    return np.interp(quantiles, scored, wrong)
