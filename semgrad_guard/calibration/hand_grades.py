"""Thresholds from few grades by hand: whose answers are graded.

Answers beyond a threshold cost grades and never help it. The grades are therefore asked for a random part of the
*surest* answers, by scores and alpha alone. Given the score after the surest answers, these are independent draws from
the population below it, and so is a random part of them. The theorem in `gates` holds for that population, and a
threshold delivers the same answers of it and of all answers. The grader is a person: the promise is about the truth.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, planning
from semgrad_guard.calibration.calibration_set import CalibrationSet, Copies, claims, read_rate, read_set
from semgrad_guard.errors import CalibrationError

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
    wrong = planning.wrong_up_to(quantiles, min(1.0, _TIMES_ALPHA * alpha), _AUROC)
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
