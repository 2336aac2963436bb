"""FusedGrad: everything one replay says, weighed by a logistic regression on graded answers of the model at hand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.evidence import Evidence
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators.base import read_off
from semgrad_guard.estimators.features import replay_features
from semgrad_guard.records import FusedWeights, Score

MIN_ANSWERS = 50
"""Fewer graded answers than this are refused (docs/results/fused.md shows why)."""

MIN_EACH = 8
"""Nor is anything fitted with fewer right, or fewer wrong, answers than this."""

_C = 0.03
"""Inverse strength of the ridge penalty (scikit-learn's C)."""

Features = Mapping[str, float]


@dataclass(frozen=True)
class FusedGrad:
    """ln P(wrong) / P(correct), any real number, by a logistic regression on the logs of what one replay yields.

    Without `weights` it only collects features (every score is None, and says so); `FusedGrad.fit` makes one that
    scores. The default reads the ordinary replay, at no extra cost. With every layer in `layers` and `last_tokens=8`
    it reads the whole grid of gradients, for which the replay begins earlier and lower. `variant`, `layers` and
    `last_tokens` are those of `Objective`. The weights mean nothing for another model: calibrations bind both.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    last_tokens: int | None = None
    weights: FusedWeights | None = None
    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "FusedGrad"

    @classmethod
    def fit(
        cls,
        records: Sequence[Features | None],
        correct: Sequence[bool],
        *,
        variant: Variant = "paper",
        layers: tuple[int, ...] | None = None,
        last_tokens: int | None = None,
    ) -> Self:
        """Fit on graded answers; the threshold must be chosen on others, or its promise is worth nothing.

        Args:
            records: each answer's `Score.features`; answers without any are left out.
            correct: True or False per answer.
            variant, layers, last_tokens: what the features were collected with.

        Raises:
            FitError: fewer than `MIN_ANSWERS` answers with features, fewer than `MIN_EACH` right or wrong ones, or
                no feature that varies.
            MissingExtraError: scikit-learn is not installed.
        """
        if len(records) != len(correct):
            raise FitError(f"There are {len(records)} records and {len(correct)} labels. Pass one of each per answer.")
        pairs = [(r, bool(right)) for r, right in zip(records, correct, strict=True) if r is not None]
        wrong = np.array([not right for _, right in pairs], dtype=np.bool_)
        require_enough(wrong)
        return cls(variant, layers, last_tokens, fit_weights([record for record, _ in pairs], wrong))

    @property
    def objective(self) -> Objective:
        """The configured span, reduction and width of the grid."""
        return Objective(self.variant, self.layers, last_tokens=self.last_tokens)

    def settings(self) -> dict[str, Any]:
        """The configuration, and the id of the fitted numbers in their place."""
        return {
            "variant": self.variant,
            "layers": None if self.layers is None else list(self.layers),
            "last_tokens": self.last_tokens,
            "weights": None if self.weights is None else self.weights.id,
        }

    def __call__(self, evidence: Evidence) -> Score:
        timed = evidence.gradients(self.objective)
        if timed is None:
            return Score(None, "the response is empty")
        features = replay_features(timed.scores)
        number, reason = self.uncertainty(features)
        parts = read_off(evidence, self.objective, lambda _: number)
        return Score(number, parts.reason if features is None else reason, parts.details, features)

    def uncertainty(self, features: Features | None) -> tuple[float | None, str | None]:
        """The score for an answer's features, or None and the reason."""
        if self.weights is None:
            return None, "FusedGrad is not fitted: run `semgrad-guard calibrate --estimator fused`"
        if features is None:
            return None, "the score is not finite"
        missing = [name for name in self.weights.names if name not in features]
        if missing:
            return None, f"this prompt's replay yields no {missing[0]}, which FusedGrad was fitted with"
        return self.weights.logit(features), None


def require_enough(wrong: NDArray[np.bool_]) -> None:
    """Raise `FitError` unless there are enough graded answers of both kinds."""
    n, n_wrong = len(wrong), int(wrong.sum())
    if n < MIN_ANSWERS or min(n_wrong, n - n_wrong) < MIN_EACH:
        raise FitError(
            f"FusedGrad takes at least {MIN_ANSWERS} graded answers with scores, {MIN_EACH} of them right and "
            f"{MIN_EACH} wrong, to be fitted on; there are {n}, {n - n_wrong} right and {n_wrong} wrong. "
            "Grade more answers, or use HybridGrad, which needs none."
        )


def fit_weights(records: Sequence[Features], wrong: NDArray[np.bool_]) -> FusedWeights:
    """Ridge-penalised logistic regression on the standardised logs of the features that all records have.

    Raises:
        FitError: no feature varies.
    """
    names = [name for name in records[0] if all(name in record for record in records)]
    raw = np.array([[record[name] for name in names] for record in records], dtype=np.float64)
    floors = np.array([column[column > 0].min(initial=np.inf) for column in raw.T])
    used = np.isfinite(floors)
    logs = np.log(np.maximum(raw[:, used], floors[used]))
    centres, scales = logs.mean(0), logs.std(0)
    varied = scales > 1e-9 * (1 + np.abs(centres))
    if not varied.any():
        raise FitError("No feature differs between the answers: there is nothing to learn. Use HybridGrad.")
    x = ((logs - centres) / np.where(varied, scales, 1.0))[:, varied]
    regression = _linear_model().LogisticRegression(C=_C, max_iter=1000).fit(x, wrong)
    kept = np.flatnonzero(used)[varied]
    return FusedWeights(
        names=tuple(names[i] for i in kept),
        floors=tuple(floors[kept].tolist()),
        centres=tuple(centres[varied].tolist()),
        scales=tuple(scales[varied].tolist()),
        weights=tuple(regression.coef_[0].tolist()),
        intercept=float(regression.intercept_[0]),
        n=len(wrong),
        n_wrong=int(wrong.sum()),
    )


def _linear_model() -> Any:
    try:
        return cast(Any, importlib.import_module("sklearn.linear_model"))
    except ImportError:
        raise MissingExtraError("scikit-learn", extra="eval") from None
