"""The threshold that the answers of all engines allow, and the fields of a `Calibration` that depend on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial, fixed_sequence, gates, hand_grades, planning, sentence_plan
from semgrad_guard.calibration.calibration_set import CalibrationSet, read_grades
from semgrad_guard.calibration.engines import Engine
from semgrad_guard.calibration.sentence_set import SentenceSet

_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "bound_if_fixed": None,
    "n_answered": 0,
    "n_answered_wrong": 0,
}


def at_gates(
    engines: Sequence[Engine], sentences: SentenceSet | None, *, robust: bool, alpha: float, delta: float
) -> tuple[int, dict[str, Any]]:
    """The engine that sets the threshold, and the fields of a `Calibration` that depend on its walk.

    Every engine walks its own gates at level delta, and the smallest threshold is delivered: the promise fails for any
    of them with probability at most delta (see `gates`).
    """
    outcomes: list[dict[str, Any]] = []
    for engine in engines:
        answers = engine.answers
        if sentences is None:
            walk = gates.walk(answers.scores, ~answers.correct, robust=robust, alpha=alpha, delta=delta)
        else:
            walk = sentences.part(answers.scored).walk(robust=robust, alpha=alpha, delta=delta)
        outcome = _outcome(answers, walk, walk.threshold, sentences, alpha=alpha, delta=delta)
        outcomes.append({"procedure": walk.procedure, "grid": walk.thresholds, **outcome})
    return min(enumerate(outcomes), key=lambda numbered: _order(numbered[1]))


def of_part(
    engine: Engine,
    part: hand_grades.Part,
    tested: CalibrationSet,
    machine: Iterable[Any] | None,
    *,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """The fields that depend on the walk over the surest answers, of which `tested` are graded by hand."""
    answers, surest, record = engine.answers, part.surest, part.record
    if machine is None:
        walk = gates.walk(tested.scores, ~tested.correct, alpha=alpha, delta=delta)
    else:
        grades = read_grades(machine, answers, part.rows(answers.scored))
        names = part.rows(engine.names)
        columns = answers.scores[surest], ~answers.correct[surest], ~grades, names
        walk = hand_grades.walk_with_machine(*columns, by_hand=record.count, alpha=alpha, delta=delta)
    outcome = _outcome(tested, walk, walk.threshold, alpha=alpha, delta=delta)
    if walk.threshold is not None:
        outcome["coverage"] = int((answers.scores <= walk.threshold).sum()) / answers.n
    else:
        beside = "" if machine is None else ", and a machine's grades of all"
        outcome["reason"] = (
            f"Of {walk.answered or record.count} grades by hand of the most certain answers, {walk.wrong} are 'wrong'. "
            f"These{beside} do not show an error rate of at most {alpha:g} with probability {1 - delta:g}. Grade more "
            "by hand, promise less (a larger alpha or delta), or take scores that tell right from wrong better."
        )
    if machine is not None:
        outcome["bound_if_fixed"] = None  # exact for the grades by hand alone
    return {"procedure": walk.procedure, "grid": walk.thresholds, **outcome}


def _order(outcome: Mapping[str, Any]) -> tuple[float, float]:
    """Engines without a threshold come first, then those with the smallest; of equal ones that of the largest bound."""
    threshold = outcome["threshold"]
    return (-math.inf if threshold is None else threshold, -(outcome["bound_if_fixed"] or 0.0))


def on_grid(
    engines: Sequence[Engine], grid: NDArray[np.float64], *, alpha: float, delta: float
) -> tuple[int, dict[str, Any]]:
    """The same for thresholds from outside.

    Every engine walks the same thresholds, each at level delta, and all stop where the first of them stops. That the
    promise then fails for any one of them has probability at most delta, not delta for each: to go past the first
    threshold whose risk exceeds alpha for some engine, that engine's own test must fail (an intersection-union test:
    Berger, Technometrics 24, 1982).
    """
    firsts = [fixed_sequence.first_testable(e.answers.scores, grid, alpha=alpha, delta=delta) for e in engines]

    def walked(until: NDArray[np.float64]) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = []
        for answers in (engine.answers for engine in engines):
            walk = fixed_sequence.walk(
                answers.scores, ~answers.correct, until, first=max(firsts), alpha=alpha, delta=delta
            )
            at = None if walk.accepted is None else float(until[walk.accepted])
            outcomes.append({"grid": tuple(grid.tolist()), **_outcome(answers, walk, at, alpha=alpha, delta=delta)})
        return outcomes

    alone = walked(grid)
    thresholds = [outcome["threshold"] for outcome in alone]
    if None in thresholds:
        return (at := thresholds.index(None)), alone[at]
    together = walked(grid[grid <= min(thresholds)])
    return min(enumerate(together), key=lambda numbered: _order(numbered[1]))


def _outcome(
    answers: CalibrationSet,
    walk: gates.Walk | fixed_sequence.Walk,
    threshold: float | None,
    sentences: SentenceSet | None = None,
    *,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on one engine's walk and the threshold that it ended at."""
    fewest = binomial.fewest_answers(alpha=alpha, delta=delta)
    if threshold is None:
        reason = _why_none(answers, walk, fewest, alpha=alpha, delta=delta)
        scored = len(answers.scores)
        if not scored or (scored >= fewest and walk.answered < fewest):
            return {**_NOTHING, "reason": reason}
        rates = {"alpha": alpha, "delta": delta}
        planned = (
            planning.advice(answers.scores, answers.correct, **rates)
            if sentences is None
            else sentence_plan.advice(sentences.part(answers.rows), **rates)
        )
        return {**_NOTHING, "reason": f"{reason} {planned}"}
    return {
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "bound_if_fixed": binomial.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _why_none(
    answers: CalibrationSet, walk: gates.Walk | fixed_sequence.Walk, fewest: int, *, alpha: float, delta: float
) -> str:
    """Why a set is too small, whatever its labels; or why even the most certain answers fail the promise."""
    if not len(answers.scores):
        return (
            f"None of the {answers.n} answers has a finite score, so none could be let through. "
            "Look at why: an empty answer has none."
        )
    if len(answers.scores) < fewest:
        return (
            f"Too few answers ({answers.n} answers, {len(answers.scores)} of them scored): even without a single error,"
            f" an error rate of at most {alpha:g} with probability {1 - delta:g} takes {fewest} scored answers."
        )
    if walk.answered < fewest:
        return (
            f"Only {walk.answered} answers are at or below the first threshold of the grid; {fewest} without an error "
            f"are the fewest that could show an error rate of at most {alpha:g} with probability {1 - delta:g}. Give "
            "a grid that reaches higher uncertainties, or none."
        )
    allowed = int(binomial.most_errors(walk.answered, alpha=alpha, delta=delta))
    return (
        f"Of the {walk.answered} most certain answers, {walk.wrong} were wrong; at most {allowed} may be, for an error "
        f"rate of at most {alpha:g} with probability {1 - delta:g}."
    )
