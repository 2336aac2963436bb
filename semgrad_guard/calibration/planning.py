"""The labels of a calibration: `plan`, the effect to expect of so many, before they are given or where a set found no
threshold; and which answers people grade where they grade few.

In a plan, the scores of right and of wrong answers are taken to be normal, so far apart that their AUROC is the given
one. The errors between two gates are drawn as binomial, at the rate of the answers there. Gates do not look ahead
here, which changes coverage by .02 at most. Real sets differ more, by their scores' distribution above all.

Answers beyond a threshold cost grades and never help it. The grades are therefore asked for a random part of the
*surest* answers, by scores and alpha alone. Given the score after the surest answers, these are independent draws from
the population below it, and so is a random part of them. The theorem in `gates` holds for that population, and a
threshold delivers the same answers of it and of all answers. The grader is a person: the promise is about the truth.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.calibration_set import CalibrationSet, Copies, claims, read_rate, read_set
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


FEWEST_SHARE = 0.5
_TIMES_ALPHA, _AUROC = 2, 0.75


class HandGrades(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The answers that people graded: `count` of the `drawn_from` surest, which are a `share` of the scored ones.

    `below` lies between the largest score among the surest and the next one.
    """

    count: int = Field(ge=1)
    share: float = Field(gt=0, le=1)
    drawn_from: int = Field(ge=1)
    below: float


@dataclass(frozen=True)
class Part:
    """The answers that people grade, in random order, by their places among the scored ones."""

    record: HandGrades
    places: NDArray[np.intp]

    def rows(self, answers: CalibrationSet) -> list[int]:
        """The caller's rows of these answers."""
        return [answers.scored[place] for place in self.places]

    def graded(self, answers: CalibrationSet, labels: Sequence[Any]) -> CalibrationSet:
        """The answers that people graded right or wrong. Abstentions go: the others are a random part of those that
        claim something, all the same.

        Raises:
            CalibrationError: one has no grade, or all abstain.
        """
        rows = self.rows(answers)
        if missing := [row for row in rows if labels[row] is None]:
            raise CalibrationError(
                f"{len(missing)} of the {len(rows)} answers that are to be graded by hand have no grade (row "
                f"{missing[0]}, for example). Grade those of `rows_to_grade`, all of them: without the hard ones the "
                "rest is no random sample."
            )
        places = self.places[claims([labels[row] for row in rows])]
        scores, correct = answers.scores[places], answers.correct[places]
        return replace(answers, scores=scores, correct=correct, n_unscored=0, n_unscored_wrong=0)


@lru_cache(maxsize=16)
def share_to_grade(alpha: float) -> float:
    """The share of the answers beyond which nothing could be delivered, if the model were wrong twice as often as alpha
    and its scores had an AUROC of 0.75; at least half."""
    quantiles = np.linspace(0, 1, 1001)[1:]
    wrong = wrong_up_to(quantiles, min(1.0, _TIMES_ALPHA * alpha), _AUROC)
    return max(FEWEST_SHARE, float(quantiles[wrong <= alpha * quantiles].max(initial=0.0)))


def draw(answers: CalibrationSet, groups: Sequence[Hashable] | None, *, alpha: float, count: int) -> Part:
    """The answers that people grade. The names of the questions (`groups`, or their rows) draw, so there is no seed.

    Raises:
        CalibrationError: no number of answers, or none has a score.
    """
    scores = answers.scores
    names = answers.scored if groups is None else [groups[row] for row in answers.scored]
    if not isinstance(count, Integral) or count < 1:
        raise CalibrationError(f"by_hand is the number of answers that people grade, not {count!r}.")
    if not len(scores):
        raise CalibrationError("No answer has a finite score, so none could be let through, and none is to be graded.")
    share = share_to_grade(alpha)
    last = np.sort(gates.leveled(scores))[math.ceil(share * len(scores)) - 1]
    below = float(gates.between(np.array([last]), scores)[0])
    ranks = [_rank(name) for name in _numbered(names)]
    surest = np.array(sorted(np.flatnonzero(scores <= below).tolist(), key=ranks.__getitem__), dtype=np.intp)
    record = HandGrades(count=min(count, len(surest)), share=share, drawn_from=len(surest), below=below)
    return Part(record, surest[: record.count])


def rows_to_grade(
    uncertainties: Iterable[float | None],
    *,
    alpha: float,
    by_hand: int,
    groups: Iterable[Hashable] | None = None,
    copies: Copies = "once",
) -> list[int]:
    """The rows that people have to grade for `calibrate(..., by_hand=by_hand)`, in random order.

    A larger number has the rows of a smaller one at its beginning. The other arguments are those of `calibrate`.

    Raises:
        CalibrationError: a column is not as described, or no answer has a score.
    """
    given, named = list(uncertainties), None if groups is None else list(groups)
    answers = read_set(given, [False] * len(given), groups=named, copies=copies)
    return draw(answers, named, alpha=read_rate(alpha, "alpha"), count=by_hand).rows(answers)


def _numbered(names: Sequence[Hashable]) -> list[str]:
    """The names, the repetitions of a question numbered: each draw of traffic has a lot of its own."""
    times: defaultdict[Hashable, int] = defaultdict(int)
    numbered: list[str] = []
    for name in names:
        times[name] += 1
        numbered.append(f"{times[name]} {name}")
    return numbered


def _rank(name: str) -> bytes:
    return hashlib.sha256(f"draw {name}".encode("utf-8", "surrogatepass")).digest()
