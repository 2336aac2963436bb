"""The threshold that a set of answers allows, or why none keeps the promise, and the promise that is in reach."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, planning
from semgrad_guard.calibration.calibration_set import CalibrationSet
from semgrad_guard.calibration.sentences import SentenceSet, sentence_advice


class Reachable(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The promise that labels support which do not support the one that was asked for (see `gates`).

    Of the `n_answered` tested answers up to `threshold`, `n_wrong` were wrong. Of all such answers at most a share
    `alpha` is, with the probability of the promise.
    """

    threshold: float
    alpha: float = Field(gt=0, lt=1)
    n_answered: int = Field(ge=1)
    n_wrong: int = Field(ge=0)

    @classmethod
    def of(cls, walk: gates.Walk, *, alpha: float) -> Reachable | None:
        """That of a walk that accepted no gate; None where it has none, or no bound."""
        if walk.accepted is not None or not walk.answered or not walk.spare:
            return None
        bound = gates.upper_bound(walk.wrong, walk.answered, delta=walk.spare)
        if bound >= 1:
            return None
        counts = {"n_answered": walk.answered, "n_wrong": walk.wrong}
        return cls(threshold=walk.thresholds[0], alpha=max(alpha, bound), **counts)

    def in_words(self, tested: int, *, requested: float) -> str:
        """What would be delivered of so many tested answers, and the promise that was requested."""
        right = self.n_answered - self.n_wrong
        low = 1 - gates.upper_bound(right, self.n_answered, delta=0.025)
        high = gates.upper_bound(self.n_wrong, self.n_answered, delta=0.025)
        return (
            f"At u <= {self.threshold:.4g}, {self.n_answered} of {tested} delivered, {self.n_wrong} wrong: "
            f"{self.n_wrong / self.n_answered:.0%} (95% interval {100 * low:.0f}-{high:.0%}). You asked for at most "
            f"{100 * requested:g}%; these labels support at most {upwards(self.alpha)}."
        )


def upwards(share: float) -> str:
    """A share in per cent with one decimal, rounded up."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:g}%"


_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "bound_if_fixed": None,
    "n_answered": 0,
    "n_answered_wrong": 0,
}


def of_answers(answers: CalibrationSet, sentences: SentenceSet | None, *, alpha: float, delta: float) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on the walk over all answers, or over their sentences."""
    if sentences is None:
        walk = gates.walk(answers.scores, ~answers.correct, alpha=alpha, delta=delta)
    else:
        walk = sentences.part(answers.scored).walk(alpha=alpha, delta=delta)
    return _outcome(answers, walk, sentences, alpha=alpha, delta=delta)


def of_part(answers: CalibrationSet, tested: CalibrationSet, *, alpha: float, delta: float) -> dict[str, Any]:
    """The fields that depend on the walk over the surest answers, of which `tested` are graded by hand."""
    walk = gates.walk(tested.scores, ~tested.correct, alpha=alpha, delta=delta, known=answers.scores)
    outcome = _outcome(tested, walk, alpha=alpha, delta=delta)
    if walk.threshold is not None:
        return {**outcome, "coverage": int((answers.scores <= walk.threshold).sum()) / answers.n}
    why = _why_none(tested, walk, gates.fewest_answers(alpha=alpha, delta=delta), alpha=alpha, delta=delta)
    reason = (
        f"{int((~tested.correct).sum())} of {tested.n} grades by hand, a random part of the surest answers, are "
        f"'wrong'. {why} Grade more by hand, promise less (a larger alpha or delta), "
        "or take scores that tell right from wrong better."
    )
    return {**outcome, "reason": reason + _no_better(tested, walk, alpha=alpha)}


def _outcome(
    answers: CalibrationSet, walk: gates.Walk, sentences: SentenceSet | None = None, *, alpha: float, delta: float
) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on a walk."""
    made = {"procedure": walk.procedure, "grid": walk.thresholds}
    threshold = walk.threshold
    fewest = gates.fewest_answers(alpha=alpha, delta=delta)
    if threshold is None:
        reason = _why_none(answers, walk, fewest, alpha=alpha, delta=delta)
        if not len(answers.scores):
            return {**_NOTHING, **made, "reason": reason}
        reason += _no_better(answers, walk, alpha=alpha)
        rates = {"alpha": alpha, "delta": delta}
        planned = (
            planning.advice(answers.scores, answers.correct, **rates)
            if sentences is None
            else sentence_advice(sentences.part(answers.rows), **rates)
        )
        reachable = Reachable.of(walk, alpha=alpha)
        useful = reachable is not None and reachable.alpha < answers.error
        return {**_NOTHING, **made, "reason": f"{reason} {planned}", "reachable": reachable if useful else None}
    return {
        **made,
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "bound_if_fixed": gates.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _no_better(answers: CalibrationSet, walk: gates.Walk, *, alpha: float) -> str:
    """Where the reachable promise is not offered: why not."""
    found = Reachable.of(walk, alpha=alpha)
    if found is None or found.alpha < answers.error:
        return ""
    return (
        f" These labels support a promise of at most {upwards(found.alpha)}, no better than without a guard "
        f"({answers.error:.1%} wrong)."
    )


def _why_none(answers: CalibrationSet, walk: gates.Walk, fewest: int, *, alpha: float, delta: float) -> str:
    """Why a set is too small, whatever its labels; or why even the most certain answers fail the promise."""
    if not len(answers.scores):
        return (
            f"None of the {answers.n} answers has a finite score, so none could be let through. "
            "Look at why: an empty answer has none."
        )
    if len(answers.scores) < fewest:
        return (
            f"Too few answers ({answers.n}, {len(answers.scores)} of them scored): even without a single error,"
            f" an error rate of at most {alpha:g} with probability {1 - delta:g} takes {fewest} scored answers."
        )
    allowed = int(gates.most_errors(walk.answered, alpha=alpha, delta=delta))
    return (
        f"Of the {walk.answered} most certain answers, {walk.wrong} were wrong; at most {allowed} may be, for an error "
        f"rate of at most {alpha:g} with probability {1 - delta:g}."
    )
