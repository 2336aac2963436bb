"""From an uncertainty to P(correct): isotonic regression, or Platt's curve over ranks; both fall in the uncertainty.

The map is a plain record, saved inside a calibration; it needs no scikit-learn, which is the tests' oracle. It is
continuous, and no two scores are nearer than their rounding (`gates.leveled`), so P(correct) does not hang on it.
No map claims more than its answers support: where n of them have one value, it stays within
[1 / (n + 2), (n + 1) / (n + 2)] (the rule of succession for n answers that all agree).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration.gates import leveled

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
