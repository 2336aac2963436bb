"""`calibrate`: from scores and labels to a threshold that keeps a promise, and P(correct) for every score.

The promise: among the answers that are let through, the error rate is at most alpha, with probability at least
1 - delta over the draw of the calibration set. It assumes that calibration questions and later questions are
exchangeable (drawn from one population, independently); `drift.py` watches for the day when they are not.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Hashable, Iterable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial, fixed_sequence
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import CalibrationSet, read_grid, read_prompts, read_rate, read_set
from semgrad_guard.calibration.choice import EstimatorChoice
from semgrad_guard.calibration.confidence import ConfidenceMethod, fit
from semgrad_guard.calibration.prompt_shape import PromptForm, PromptShape
from semgrad_guard.errors import CalibrationError

_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "risk_bound": None,
    "n_answered": 0,
    "n_answered_wrong": 0,
}


def calibrate(
    uncertainties: Iterable[float | None],
    correct: Iterable[Any],
    *,
    alpha: float,
    delta: float,
    grid: Iterable[float] | None = None,
    binding: Binding | None = None,
    confidence: ConfidenceMethod = "isotonic",
    seed: SupportsIndex = 0,
    groups: Iterable[Hashable] | None = None,
    created: str | None = None,
    choice: EstimatorChoice | None = None,
    prompts: Iterable[PromptForm | None] | None = None,
) -> Calibration:
    """Find the largest threshold whose error rate is at most alpha, with probability at least 1 - delta.

    `uncertainties` (higher = less certain) and `correct` (True or False) describe one answer each. An answer whose
    score is None, NaN or infinite is never let through, and counted. `grid` holds thresholds fixed *without* these
    answers' labels, best from unlabelled scores of other questions; without it, a fifth of the answers (at most 300,
    chosen by `seed`) supplies about 30 quantiles and the rest is tested.

    `groups` names each answer's question. Copies of one question are not independent draws: they make the set look
    larger than it is, so only the first answer of each group is used, and the others are counted.

    `choice` says how the estimator was learned from other answers, and is kept. If `groups` name a question among
    those that it was learned from, the set is refused.

    `prompts` says what each answer's prompt looked like (`model.render(conversation).form`; None: none was sent). Their
    common shape is kept, and the promise is about prompts of that shape. Without them the calibration gives a threshold
    and promises nothing.

    Where no threshold keeps the promise, `threshold` is None and `reason` says why: nothing is then let through.
    """
    alpha, delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
    if confidence not in ("isotonic", "platt"):
        raise CalibrationError(f"confidence must be 'isotonic' or 'platt', not {confidence!r}.")
    seed = _whole(seed)
    named = list(groups) if isinstance(groups, Iterable) else groups
    answers = read_set(uncertainties, correct, groups=named)
    if choice is not None:
        choice.require_others(map(str, named or ()))
    outside = None if grid is None else read_grid(grid)
    tested, thresholds, first = _prepare(answers, outside, alpha=alpha, delta=delta, seed=seed)
    outcome = _outcome(answers, tested, thresholds, first=first, alpha=alpha, delta=delta)
    return Calibration.seal(
        created=created or datetime.datetime.now(datetime.UTC).date().isoformat(),
        alpha=alpha,
        delta=delta,
        n=answers.n,
        n_wrong=int((~answers.correct).sum()) + answers.n_unscored_wrong,
        n_unscored=answers.n_unscored,
        n_duplicates=answers.n_duplicates,
        n_tested=len(tested),
        split_seed=seed if outside is None else None,
        grid=tuple(thresholds.tolist()),
        scores=tuple(np.sort(answers.scores).tolist()),
        confidence_map=fit(answers.scores, answers.correct, confidence) if len(answers.scores) else None,
        binding=binding,
        choice=choice,
        shape=None if prompts is None else PromptShape.of(read_prompts(prompts, answers)),
        **outcome,
    )


def _whole(seed: SupportsIndex) -> int:
    """A seed as an int, numpy's whole numbers included."""
    try:
        found = operator.index(seed)
    except TypeError:
        found = -1
    if found < 0 or isinstance(seed, bool):
        raise CalibrationError(f"seed must be a whole number that is not negative; it is {seed!r}.")
    return found


def _prepare(
    answers: CalibrationSet, outside: NDArray[np.float64] | None, *, alpha: float, delta: float, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.float64], int]:
    """(rows to test, rising thresholds, index of the first one to test); no label is looked at."""
    n = len(answers.scores)
    if outside is not None:
        first = fixed_sequence.first_testable(answers.scores, outside, alpha=alpha, delta=delta)
        return np.arange(n), outside, first
    for_grid, tested = fixed_sequence.split(n, seed=seed)
    if not len(for_grid):
        return tested, np.empty(0), 0
    grid = fixed_sequence.split_grid(answers.scores[for_grid], n_tested=len(tested), alpha=alpha, delta=delta)
    return tested, grid, 0


def _outcome(
    answers: CalibrationSet,
    tested: NDArray[np.intp],
    grid: NDArray[np.float64],
    *,
    first: int,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on the walk."""
    scores, wrong = answers.scores[tested], ~answers.correct[tested]
    fewest = binomial.fewest_answers(alpha=alpha, delta=delta)
    if len(scores) < fewest or not len(grid):
        return {**_NOTHING, "reason": _too_few(answers, len(scores), fewest, alpha=alpha, delta=delta)}
    walk = fixed_sequence.walk(scores, wrong, grid, first=first, alpha=alpha, delta=delta)
    if walk.accepted is None:
        return {**_NOTHING, "reason": _not_kept(walk, float(grid[first]), fewest, alpha=alpha, delta=delta)}
    threshold = float(grid[walk.accepted])
    return {
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "risk_bound": binomial.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _too_few(answers: CalibrationSet, n_tested: int, fewest: int, *, alpha: float, delta: float) -> str:
    """Why a set is too small, whatever its labels."""
    if not len(answers.scores):
        return f"None of the {answers.n} answers has a finite score, so none could be let through. Score them first."
    counts = f"{answers.n} answers, {len(answers.scores)} of them scored, {n_tested} left to test"
    return (
        f"Too few answers ({counts}): even without a single error, an error rate of at most {alpha:g} with probability "
        f"{1 - delta:g} takes {fewest} tested answers, and about three times as many to allow for errors. "
        "Label more answers, pass a grid made from unlabelled scores so that none are spent on it, "
        "or promise less (a larger alpha or delta)."
    )


def _not_kept(walk: fixed_sequence.Walk, threshold: float, fewest: int, *, alpha: float, delta: float) -> str:
    """Why even the most certain answers fail the promise, and what would help."""
    if walk.answered < fewest:
        return (
            f"Only {walk.answered} tested answers are at or below the threshold to begin with ({threshold:g}); "
            f"{fewest} without an error are the fewest that could show an error rate of at most {alpha:g} with "
            f"probability {1 - delta:g}. Label more answers, or pass a grid that reaches higher uncertainties."
        )
    allowed = binomial.most_errors(walk.answered, alpha=alpha, delta=delta)
    seen = (
        f"Of the {walk.answered} most certain answers tested (uncertainty at most {threshold:g}), {walk.wrong} were "
        f"wrong; at most {allowed} may be, for an error rate of at most {alpha:g} with probability {1 - delta:g}. "
    )
    if walk.wrong <= alpha * walk.answered:
        return seen + "Their error rate is within alpha but not surely so: label more answers, or promise less."
    return seen + (
        "Their error rate is above alpha, so more answers alone are unlikely to help: "
        "promise less (a larger alpha), or use a model or an estimator that tells right from wrong better."
    )
