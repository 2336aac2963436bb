"""Thresholds from few grades by hand: whose answers are graded, and the walk with a machine's grades next to them.

Answers beyond a threshold cost grades and never help it. The grades are therefore asked for a random part of the
*surest* answers, by scores and alpha alone.

**Gates on the grades by hand.** Given the score after the surest answers, these are independent draws from the
population below it, and so is a random part of them. The theorem in `gates` holds for that population, and a threshold
delivers the same answers of it and of all answers. The grader is a person: the promise is about the truth.

**Prediction-powered bets** take a machine's grades of all the surest answers as well. At a gate the K most certain
answers are delivered, h of them graded by hand. They are looked at in random order. X = g + (y - g) i / p is the grade
of one answer: g is the machine's and y the person's (1: wrong), i tells whether the person graded it, and p is the
share of grades by hand among the answers that are left. A bet against the error rate alpha multiplies its capital by
1 - b (X - alpha), with a stake b that only earlier answers decide and that keeps it positive. The gate passes where the
capital ever reaches 1 / delta (Ville's inequality).

*Proof.* Which of the K answers a person grades is drawn without a look at scores or grades. So i is 1 with probability
p whatever the past, the answer, and its grades are, and the expectation of X given all these is y. Let J be the first
gate beyond the crossing, as in the proof of `gates`: given the number of answers up to t*, the others at the gate are
wrong at a rate above alpha. In random order the next answer is one or the other, so the expectation of X given the past
is at least alpha, and that of the capital does not grow. Nothing is assumed about the machine: its mistakes may depend
on the score, the answer and each other. A bad one costs coverage.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, planning
from semgrad_guard.calibration.calibration_set import Copies, read_rate, read_set
from semgrad_guard.errors import CalibrationError

T = TypeVar("T")

FEWEST_SHARE = 0.5
_TIMES_ALPHA, _AUROC = 2, 0.75
_FIRST, _FEWEST_BY_HAND, _GATES = 0.5, 50, 10
_BOLDNESS = 0.9
"""The part of the largest stake that keeps the capital positive."""
_SPREAD = 0.3
"""The first guess at the variance, as a part of the largest one at rate alpha."""


class HandGrades(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The answers that people graded: `count` of the `drawn_from` surest, which are a `share` of the scored ones.

    `below` lies between the largest score among the surest and the next one. `machine`: a grader graded all of these
    as well.
    """

    count: int = Field(ge=1)
    share: float = Field(gt=0, le=1)
    drawn_from: int = Field(ge=1)
    below: float
    machine: bool = False


@dataclass(frozen=True)
class Part:
    """The surest answers in random order, those graded by hand first; places among the scored answers."""

    record: HandGrades
    surest: NDArray[np.intp]

    @property
    def by_hand(self) -> NDArray[np.intp]:
        """The answers that people grade."""
        return self.surest[: self.record.count]

    def rows(self, column: Sequence[T]) -> list[T]:
        """The entries of the surest answers in a column of the scored ones."""
        places: list[int] = self.surest.tolist()
        return [column[place] for place in places]


@lru_cache(maxsize=16)
def share_to_grade(alpha: float) -> float:
    """The share of the answers beyond which nothing could be delivered, if the model were wrong twice as often as alpha
    and its scores had an AUROC of 0.75; at least half."""
    quantiles = np.linspace(0, 1, 1001)[1:]
    wrong = planning.wrong_up_to(quantiles, min(1.0, _TIMES_ALPHA * alpha), _AUROC)
    return max(FEWEST_SHARE, float(quantiles[wrong <= alpha * quantiles].max(initial=0.0)))


def draw(scores: NDArray[np.float64], names: Sequence[Hashable], *, alpha: float, count: int, machine: bool) -> Part:
    """The surest answers, and which are graded by hand. The names of their questions draw, so there is no seed.

    Raises:
        CalibrationError: no number of answers, or none has a score.
    """
    if count < 1:
        raise CalibrationError(f"by_hand is the number of answers that people grade, not {count!r}.")
    if not len(scores):
        raise CalibrationError("No answer has a finite score, so none could be let through, and none is to be graded.")
    share = share_to_grade(alpha)
    last = np.sort(gates.leveled(scores))[math.ceil(share * len(scores)) - 1]
    below = float(gates.between(np.array([last]), scores)[0])
    ranks = [_rank(name, "draw") for name in _numbered(names)]
    surest = np.array(sorted(np.flatnonzero(scores <= below).tolist(), key=ranks.__getitem__), dtype=np.intp)
    record = HandGrades(
        count=min(count, len(surest)), share=share, drawn_from=len(surest), below=below, machine=machine
    )
    return Part(record, surest)


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
    names = answers.scored if named is None else [named[row] for row in answers.scored]
    part = draw(answers.scores, names, alpha=read_rate(alpha, "alpha"), count=by_hand, machine=False)
    return part.rows(answers.scored)[: part.record.count]


def walk_with_machine(
    scores: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    machine: NDArray[np.bool_],
    names: Sequence[Hashable],
    *,
    by_hand: int,
    alpha: float,
    delta: float,
    known: NDArray[np.float64],
) -> gates.Walk:
    """Walk the gates of the surest answers, the first `by_hand` of which people have graded (`wrong`).

    `machine` has the other grader's grades of all, `known` the scores of all answers. The walk counts answers that were
    graded by hand.
    """
    n = len(scores)
    thresholds = gates.between(np.unique(np.sort(gates.leveled(scores))[gate_counts(n, by_hand=by_hand) - 1]), known)
    ranks = [_rank(name, "order") for name in _numbered(names)]
    order = np.array(sorted(range(n), key=ranks.__getitem__), dtype=np.intp)
    hand = order < by_hand
    capital = bets(
        machine[order], wrong[order], hand, scores[order] <= thresholds[:, None], alpha=alpha, enough=1 / delta
    )
    accepted = gates.last_in_a_row(capital >= 1 / delta)
    inside = scores[:by_hand] <= thresholds[accepted or 0]
    errors = int((wrong[:by_hand] & inside).sum())
    return gates.Walk("prediction-powered", tuple(thresholds.tolist()), accepted, int(inside.sum()), errors)


def gate_counts(n: int, *, by_hand: int) -> NDArray[np.intp]:
    """The gates over n answers: none holds less than half of them, or less than 50 grades by hand on average."""
    first = min(n, math.ceil(max(_FIRST * n, _FEWEST_BY_HAND * n / by_hand)))
    return np.unique(np.linspace(first, n, _GATES).round().astype(np.intp))


def bets(
    machine: NDArray[np.bool_],
    wrong: NDArray[np.bool_],
    hand: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    *,
    alpha: float,
    enough: float,
) -> NDArray[np.float64]:
    """The largest capital of bets against an error rate of alpha, by test.

    `inside` tells for each test (row) which answers it is about, in random order (column). The other columns are of all
    tests, or have a row for each. `wrong` counts where a person has graded (`hand`). Stakes aim at `enough`.
    """
    left, left_by_hand = inside.sum(axis=1).astype(float), (inside & hand).sum(axis=1).astype(float)
    squares, seen = alpha * _SPREAD * left / np.maximum(left_by_hand, 1), np.ones(len(inside))
    capital = np.zeros(len(inside))  # logarithms
    largest, goal = capital.copy(), math.log(enough)
    for at in range(inside.shape[1]):
        bet = inside[:, at] & (left_by_hand > 0)
        times = np.where(bet, left / np.maximum(left_by_hand, 1), 1.0)  # 1 / p
        g, y, i = (column[..., at].astype(float) for column in (machine, wrong, hand))
        gain = np.where(bet, g + (y - g) * i * times - alpha, 0.0)
        hoped = np.sqrt(2 * np.maximum(goal - capital, 0) / np.maximum(left, 1) * seen / squares)
        capital += np.log1p(-np.minimum(hoped, _BOLDNESS / (times - alpha)) * gain)
        largest = np.maximum(largest, capital)
        squares, seen = squares + gain**2, seen + bet
        left, left_by_hand = left - inside[:, at], left_by_hand - (inside[:, at] & hand[..., at])
    return np.exp(largest)


def _numbered(names: Sequence[Hashable]) -> list[str]:
    """The names, the repetitions of a question numbered: each draw of traffic has a lot of its own."""
    times: defaultdict[Hashable, int] = defaultdict(int)
    numbered: list[str] = []
    for name in names:
        times[name] += 1
        numbered.append(f"{times[name]} {name}")
    return numbered


def _rank(name: str, purpose: str) -> bytes:
    return hashlib.sha256(f"{purpose} {name}".encode("utf-8", "surrogatepass")).digest()
