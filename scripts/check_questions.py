"""Simulates promises about questions of several dependent calls, whose number depends on the data.

    python scripts/check_questions.py [--repetitions 10000] [--page docs/results/questions.md]

The score of a question is that of its least certain call, and the first refused call ends the question. It fails where
that breaks its promise in more than .106 of the calibrations (delta = .1), and where the way that it replaces does not:
to gate calls one by one and continue from an abstention, with the threshold of the last call's score.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from check_guarantee import Floats
from numpy.typing import NDArray
from simulations import WITHIN, arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration.gates import walk

ALPHA = DELTA = 0.1
SIZES = (100, 400)
MOST = 8
"""Calls of a question, at most."""
POPULATION = 200_000
Flags = NDArray[np.bool_]
Rng = np.random.Generator


@dataclass(frozen=True)
class Questions:
    """Questions of one kind: their calls' scores (NaN behind the last), the last one, and whether the end is wrong."""

    scores: Floats
    last: NDArray[np.int64]
    wrong: Flags
    difficulty: Floats

    @property
    def worst(self) -> Floats:
        """The scores of the questions: those of their least certain calls."""
        return np.nanmax(self.scores, axis=1)

    @property
    def own(self) -> Floats:
        """The scores of the last calls alone."""
        return self.scores[np.arange(len(self.last)), self.last]


def score(rng: Rng, difficulty: Floats, slip: Flags, *, telling: float = 1.8) -> Floats:
    """A call's score: higher where its question is hard, and where something has gone wrong."""
    noise = rng.normal(size=len(difficulty)) * 0.8
    return 1 / (1 + np.exp(1.7 - telling * slip - 0.7 * difficulty - noise))


def chance(difficulty: Floats, rate: float) -> Floats:
    """The probability of a slip, about `rate` on average."""
    return 2 * rate / (1 + np.exp(-difficulty))


def refined(rng: Rng, n: int) -> Questions:
    """One to six passages, each with a call that may repair an error or make one."""
    difficulty, wrong = rng.normal(size=n), np.zeros(n, bool)
    length, scores = rng.integers(1, 7, n), np.full((n, MOST), np.nan)
    for call in range(6):
        on = call < length
        slips, heals = rng.random(n) < chance(difficulty, 0.1), rng.random(n) < 0.3
        wrong = np.where(on, (wrong & ~heals) | slips, wrong)
        scores[on, call] = score(rng, difficulty, wrong)[on]
    return Questions(scores, length - 1, wrong, difficulty)


def agents(rng: Rng, n: int) -> Questions:
    """Up to eight steps: a doubtful one makes another step more probable."""
    difficulty, wrong = rng.normal(size=n), np.zeros(n, bool)
    on, last, scores = np.ones(n, bool), np.zeros(n, np.int64), np.full((n, MOST), np.nan)
    for call in range(MOST):
        wrong |= on & (rng.random(n) < chance(difficulty, 0.1))
        found = score(rng, difficulty, wrong)
        scores[on, call], last[on] = found[on], call
        on &= rng.random(n) < np.clip(0.25 + 0.9 * found, 0, 0.95)
    return Questions(scores, last, wrong, difficulty)


def sub_questions(rng: Rng, n: int) -> Questions:
    """One to four answers to parts at the same time, and one answer made of them."""
    difficulty, parts, scores = rng.normal(size=n), rng.integers(1, 5, n), np.full((n, MOST), np.nan)
    slipped = np.zeros(n, bool)
    for call in range(4):
        on = call < parts
        slips = on & (rng.random(n) < chance(difficulty, 0.12))
        scores[on, call] = score(rng, difficulty, slips)[on]
        slipped |= slips
    wrong = (slipped & (rng.random(n) < 0.8)) | (rng.random(n) < 0.04)
    scores[:, 4] = score(rng, difficulty, wrong, telling=1.2)
    return Questions(scores, np.full(n, 4), wrong, difficulty)


def condensed(rng: Rng, n: int) -> Questions:
    """A call that condenses the question, whose score tells little, and the answer."""
    difficulty, scores = rng.normal(size=n), np.full((n, MOST), np.nan)
    scores[:, 0] = score(rng, 0.3 * difficulty, np.zeros(n, bool))
    wrong = rng.random(n) < chance(difficulty, 0.22)
    scores[:, 1] = score(rng, difficulty, wrong)
    return Questions(scores, np.full(n, 1), wrong, difficulty)


def continued(rng: Rng, of: Questions, threshold: float) -> tuple[Flags, Flags]:
    """Delivered, and wrong, where a refused call is replaced by an abstention and the question continues: the step's
    information is missing, and the last call guesses in half of the cases as fluently as ever."""
    earlier = np.arange(MOST)[None, :] < of.last[:, None]
    hit = ((of.scores > threshold) & earlier).any(axis=1)
    wrong = np.where(hit, rng.random(len(hit)) < 0.55, of.wrong)
    own = np.where(hit, score(rng, 0.5 * of.difficulty, np.zeros(len(hit), bool)), of.own)
    return own <= threshold, wrong


KINDS: dict[str, Callable[[Rng, int], Questions]] = {
    "refined answers": refined,
    "agents": agents,
    "sub-questions": sub_questions,
    "condensed questions": condensed,
}
RULES = ("the least certain call", "the last call, the others helpers", "each call by itself")


@dataclass(frozen=True)
class Row:
    """Of one kind and size: by rule the shares of calibrations with a threshold and with a broken promise, and the
    share of questions that is delivered."""

    kind: str
    n: int
    error: float
    calls: float
    found: tuple[float, ...]
    broken: tuple[float, ...]
    delivered: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """The two rules that are offered keep the promise, and the third does not."""
        return max(self.broken[:2]) <= WITHIN < self.broken[2]


Outcome = Callable[[float], tuple[float, float]]
"""Of a threshold the error rate among the delivered questions, and their share of all."""


def gated(scores: Floats, wrong: Flags) -> Outcome:
    """Of a population whose questions stop at a threshold."""
    order = np.argsort(scores)
    known, errors = scores[order], np.cumsum(wrong[order])

    def outcome(threshold: float) -> tuple[float, float]:
        count = int(np.searchsorted(known, threshold, side="right"))
        return (errors[count - 1] / count if count else 0.0), count / len(known)

    return outcome


def altered(rng: Rng, population: Questions) -> Outcome:
    """Of a population whose questions continue, at the nearest of a hundred thresholds."""
    grid = np.quantile(population.own, np.linspace(0.01, 1, 100))
    outcomes: list[tuple[float, float]] = []
    for threshold in grid:
        through, wrong = continued(rng, population, threshold)
        outcomes.append((float((through & wrong).sum() / max(1, through.sum())), float(through.mean())))
    return lambda threshold: outcomes[int(np.abs(grid - threshold).argmin())]


def simulated(kind: str, n: int, repetitions: int) -> Row:
    """One row of the table."""
    make, rng = KINDS[kind], np.random.default_rng([n, list(KINDS).index(kind)])
    everyone = make(rng, POPULATION)
    outcomes = (gated(everyone.worst, everyone.wrong), gated(everyone.own, everyone.wrong), altered(rng, everyone))
    totals = np.zeros((3, len(RULES)))
    for _ in range(repetitions):
        drawn = make(rng, n)
        thresholds = [
            walk(scores, drawn.wrong, alpha=ALPHA, delta=DELTA).threshold for scores in (drawn.worst, drawn.own)
        ]
        for rule, threshold in enumerate([*thresholds, thresholds[1]]):
            if threshold is not None:
                error, share = outcomes[rule](threshold)
                totals[:, rule] += 1, error > ALPHA, share
    found, broken, delivered = (tuple(column / repetitions) for column in totals)
    calls = float(np.isfinite(everyone.scores).sum(axis=1).mean())
    return Row(kind, n, float(everyone.wrong.mean()), calls, found, broken, delivered)


def main() -> int:
    """Simulate, print, and fail where a promise is broken more often than delta allows."""
    given = arguments(__doc__)
    rows = simulated_all(simulated, product(KINDS, SIZES), given.repetitions, workers=given.workers)
    lines = [
        "# Promises about questions of several calls",
        "",
        f"`python scripts/check_questions.py --repetitions {given.repetitions}`, {when_and_where()}. alpha = delta = "
        f"{ALPHA}. A question makes several calls, which depend on each other and whose number depends on their "
        "results. Shares of the calibrations with a broken promise; in brackets the share of questions that is "
        "delivered.",
        "",
        *table(
            ("questions", "wrong", "calls", "labels", *RULES),
            (
                (
                    row.kind,
                    f"{row.error:.2f}",
                    f"{row.calls:.1f}",
                    row.n,
                    *(f"{broken:.3f} ({got:.2f})" for broken, got in zip(row.broken, row.delivered, strict=True)),
                )
                for row in rows
            ),
        ),
        "The first rule is that of `guarded` and `asking`, the second the same with helpers declared "
        "(`router=False`). In the third, calls are refused one by one and the question continues from an abstention: "
        "no threshold that was found on whole runs says anything about those runs.",
        "",
    ]
    return finished(given.page, lines, kept=all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
