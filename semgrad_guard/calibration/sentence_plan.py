"""Planning by sentence: the effect to expect of so many labelled answers, from answers that are drawn again and again.

Where a set found no threshold, its own answers are drawn, with all that their sentences have in common. Before anything
is labelled they are simulated: scores of right and of wrong sentences are normal, as in `planning`, and correlated in
an answer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial, planning
from semgrad_guard.calibration.calibration_set import read_rate
from semgrad_guard.calibration.planning import Plan
from semgrad_guard.calibration.sentence_gates import Promise
from semgrad_guard.calibration.sentence_set import SentenceSet
from semgrad_guard.errors import CalibrationError
from semgrad_guard.settings import OnDoubt

CORRELATION = 0.3
"""That of two sentences of one answer, in their scores and in their truth."""
_SETS, _POPULATION = 100, 2000


def simulated(*, error: float, auroc: float, sentences: int, on_doubt: OnDoubt, promise: Promise) -> SentenceSet:
    """Answers of so many sentences, of which this share is wrong. No sentence leans on another one.

    Raises:
        CalibrationError: a number is out of its range.
    """
    if sentences < 1 or not (0 <= error <= 1 and 0 <= auroc <= 1):
        raise CalibrationError(
            "A plan by sentence takes at least one sentence an answer, and an error rate and an AUROC in [0, 1], not "
            f"{sentences}, {error} and {auroc}."
        )
    rng, shape = np.random.default_rng(0), (_POPULATION, sentences)

    def normal() -> NDArray[np.float64]:
        common, own = rng.normal(size=(_POPULATION, 1)), rng.normal(size=shape)
        return math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own

    order = np.argsort(normal(), axis=None)
    wrong = np.zeros(shape, np.bool_)
    wrong.ravel()[order[: round(error * order.size)]] = True
    scores: NDArray[np.float64] = normal() + planning.shift(auroc) * wrong
    compared = np.maximum.accumulate(scores, axis=1) if on_doubt in ("stop", "escalate") else scores
    lengths = np.full(_POPULATION, sentences)
    return SentenceSet(compared, wrong, rng.random(shape), lengths, on_doubt, promise)


def plan(n: int, answers: SentenceSet, *, alpha: float, delta: float) -> Plan:
    """The effect to expect of n labelled answers like these, by 100 sets of them (the same ones every time).

    Raises:
        CalibrationError: a number is out of its range.
    """
    if n < 1:
        raise CalibrationError(f"A plan takes at least one label, not {n}.")
    rates = {"alpha": read_rate(alpha, "alpha"), "delta": read_rate(delta, "delta")}
    rng, found = np.random.default_rng(n), list[float]()
    for _ in range(_SETS):
        part = answers.part(rng.integers(len(answers.lengths), size=n).tolist())
        threshold = replace(part, keys=rng.random(part.keys.shape)).walk(**rates, robust=False).threshold
        found += [] if threshold is None else [threshold]
    every = int(answers.lengths.sum())
    shares = [int((answers.compared <= threshold).sum()) / every for threshold in found]
    error, quality = _quality(answers)
    return Plan(n, alpha, delta, error, quality or 0.0, len(found) / _SETS, math.fsum(shares) / _SETS, "sentences")


def advice(answers: SentenceSet, *, alpha: float, delta: float) -> str:
    """The labels that it takes, by answers with which no threshold was found."""
    error, quality = _quality(answers)
    if quality is None:
        return planning.of_one_kind(error, binomial.fewest_answers(alpha=alpha, delta=delta))
    planned = partial(plan, answers=answers, alpha=alpha, delta=delta)
    return planning.in_words(planned(len(answers.lengths)), planning.enough_of(planned))


def _quality(answers: SentenceSet) -> tuple[float, float | None]:
    """The error rate of the sentences, and the AUROC of their scores."""
    scores, right = answers.graded
    return float((~right).mean()) if len(right) else 1.0, planning.auroc(scores, right)
