"""The threshold that a set of answers allows, or why none keeps the promise, and the promise that is in reach; and
from an uncertainty to P(correct): isotonic regression, or Platt's curve over ranks, which both fall in the
uncertainty.

The map of P(correct) is a plain record, saved inside a calibration; it needs no scikit-learn, which is the tests'
oracle. It is continuous, and no two scores are nearer than their rounding (`gates.leveled`), so P(correct) does not
hang on it. No map claims more than its answers support: where n of them have one value, it stays within [1 / (n + 2),
(n + 1) / (n + 2)] (the rule of succession for n answers that all agree).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, planning
from semgrad_guard.calibration.calibration_set import CalibrationSet
from semgrad_guard.calibration.gates import leveled
from semgrad_guard.calibration.sentence_gates import SentenceSet, sentence_advice

FEWEST_FOR_ISOTONIC = 300
"""Scored answers below which the default is Platt's curve over the scores' ranks: an isotonic map of 50 claims .93
where .82 are right, and a curve over the scores themselves depends on their scale, often many powers of ten."""
_KNOTS = 32  # of a curve over ranks


class ConfidenceMap(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Straight lines between knots, flat beyond them: `uncertainties` rise, `confidences` never do. Fitted by isotonic
    regression, or a logistic curve over the normal quantiles of the scores' ranks ("ranks").

    Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability estimates", KDD 2002.
    """

    method: Literal["isotonic", "ranks"]
    uncertainties: tuple[float, ...] = Field(min_length=1)
    confidences: tuple[float, ...] = Field(min_length=1)

    def __call__(self, uncertainty: float) -> float:
        """P(correct) in (0, 1) for a finite uncertainty."""
        right = bisect_right(self.uncertainties, uncertainty)
        if right == 0 or right == len(self.uncertainties):
            return self.confidences[min(right, len(self.confidences) - 1)]
        share = _share(self.uncertainties[right - 1], uncertainty, self.uncertainties[right])
        high, low = self.confidences[right - 1], self.confidences[right]
        return min(high, max(low, high + share * (low - high)))


def fit(scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> ConfidenceMap:
    """Fit P(correct | uncertainty) on at least one finite score and its label, by a method as their number allows."""
    order = np.lexsort((correct, scores))  # a sum of floats depends on its order, and an id must not
    scores, correct = leveled(scores[order]), correct[order]
    return fit_isotonic(scores, correct) if len(scores) >= FEWEST_FOR_ISOTONIC else fit_ranks(scores, correct)


def fit_isotonic(scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> ConfidenceMap:
    """Least squares among functions that never rise; tied scores share one value."""
    from scipy import optimize  # slow to import: reading a confidence must not wait for it

    knots, where = np.unique(scores, return_inverse=True)
    weights = np.bincount(where).astype(np.float64)
    means = np.bincount(where, weights=correct.astype(np.float64)) / weights
    fitted = np.asarray(optimize.isotonic_regression(means, weights=weights, increasing=False).x, dtype=np.float64)
    fitted = _supported(fitted, weights)
    kept = np.ones(len(fitted), dtype=np.bool_)  # all knots but those that are equal to both neighbours
    kept[1:-1] = (fitted[1:-1] != fitted[:-2]) | (fitted[1:-1] != fitted[2:])
    return ConfidenceMap(
        method="isotonic", uncertainties=tuple(knots[kept].tolist()), confidences=tuple(fitted[kept].tolist())
    )


def fit_ranks(scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> ConfidenceMap:
    """Platt's logistic curve over the normal quantiles of the scores' ranks, whatever the scale of the scores."""
    from scipy import special

    knots, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    quantiles = np.asarray(special.ndtri((np.cumsum(counts) - counts / 2) / len(scores)), dtype=np.float64)
    slope, intercept = _logistic(quantiles[where], _targets(correct))
    fitted = np.clip(special.expit(intercept - slope * quantiles), *_limits(len(scores)))
    kept = np.unique(np.linspace(0, len(knots) - 1, _KNOTS).round().astype(np.intp))
    return ConfidenceMap(
        method="ranks", uncertainties=tuple(knots[kept].tolist()), confidences=tuple(fitted[kept].tolist())
    )


def _targets(correct: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Platt's smoothed labels."""
    n_correct, n_wrong = int(correct.sum()), int((~correct).sum())
    return np.where(correct, (n_correct + 1.0) / (n_correct + 2.0), 1.0 / (n_wrong + 2.0))


def _logistic(x: NDArray[np.float64], targets: NDArray[np.float64]) -> tuple[float, float]:
    """(slope >= 0, intercept) that minimise the cross-entropy of expit(intercept - slope * x) against `targets`."""
    from scipy import optimize

    design = np.stack([-x, np.ones_like(x)])

    def loss(theta: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits = theta @ design
        value = np.logaddexp(0.0, logits) - targets * logits
        return float(value.mean()), design @ (0.5 + 0.5 * np.tanh(logits / 2) - targets) / len(x)

    result = optimize.minimize(
        loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(0.0, None), (None, None)],
        options={"ftol": 1e-15, "gtol": 1e-10},
    )  # fmt: skip
    return float(result.x[0]), float(result.x[1])


def _supported(fitted: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each level of a falling step function within what the answers on that level support; still falling.

    Three right answers at the certain end are no 99 %: the level is lowered to 4 / 5, but not below its neighbour.
    """
    _, level = np.unique(fitted, return_inverse=True)
    lowest, highest = _limits(np.bincount(level, weights=weights)[level])
    capped = np.maximum.accumulate(np.minimum(fitted, highest)[::-1])[::-1]
    return np.minimum.accumulate(np.maximum(capped, lowest))


def _limits(n: Any) -> tuple[Any, Any]:
    """The lowest and highest confidence that n answers can support (n: a number, or an array of them)."""
    return 1.0 / (n + 2.0), (n + 1.0) / (n + 2.0)


def _share(left: float, middle: float, right: float) -> float:
    """How far `middle` lies between two knots, in [0, 1], also where their distance overflows a float."""
    distance = right - left
    if distance == float("inf"):
        return (middle / 2 - left / 2) / (right / 2 - left / 2)
    return (middle - left) / distance


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
