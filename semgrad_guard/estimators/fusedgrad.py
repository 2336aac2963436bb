"""FusedGrad: everything one replay says, weighed by a logistic regression on graded answers of the model at hand."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators.base import read_off
from semgrad_guard.estimators.features import replay_features
from semgrad_guard.records import LOG, FusedWeights, Score

MIN_ANSWERS = 50
"""Fewer graded answers than this are refused (docs/results/fused.md shows why)."""

MIN_EACH = 8
"""Nor is anything fitted with fewer right, or fewer wrong, answers than this."""

_C = 0.3
"""Inverse strength of the ridge penalty (scikit-learn's C); docs/results/fused.md compares others."""

_AS_IS = frozenset({"mean_entropy", "gnll", "mean_nll", "length", "first_nll", "first_entropy"})
"""Features that enter as they are besides their logarithms."""

Features = Mapping[str, float]


@dataclass(frozen=True)
class FusedGrad:
    """ln P(wrong) / P(correct), any real number, by a logistic regression on what one replay yields.

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
            records: each answer's `Score.features`; answers without any, or with one that is not finite, are left out.
            correct: True or False (or 1 or 0) per answer.
            variant, layers, last_tokens: what the features were collected with.

        Raises:
            FitError: labels that are neither, fewer than `MIN_ANSWERS` answers with features, fewer than `MIN_EACH`
                right or wrong ones, or no feature that varies.
            MissingExtraError: scikit-learn is not installed.
        """
        if len(records) != len(correct):
            raise FitError(f"There are {len(records)} records and {len(correct)} labels. Pass one of each per answer.")
        if any(label not in (True, False) for label in correct):
            raise FitError("Each label must be True or False (or 1 or 0): grade the answers first.")
        usable = [r is not None and all(map(math.isfinite, r.values())) for r in records]
        wrong = np.array([not right for right, use in zip(correct, usable, strict=True) if use], dtype=np.bool_)
        require_enough(wrong)
        weights = fit_weights([r for r, use in zip(records, usable, strict=True) if use and r is not None], wrong)
        return cls(variant, layers, last_tokens, weights)

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
        missing = self.weights.features - features.keys()
        if missing:
            return None, f"this prompt's replay yields no {min(missing)}, which FusedGrad was fitted with"
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
    """Ridge-penalised logistic regression on the standardised columns of the features that all records have.

    Raises:
        FitError: no feature varies.
    """
    shared = [name for name in records[0] if all(name in record for record in records)]
    columns = [
        _column(name, records) for name in (*(LOG + name for name in shared), *(n for n in shared if n in _AS_IS))
    ]
    kept = [column for column in columns if column is not None]
    if not kept:
        raise FitError("No feature differs between the answers: there is nothing to learn. Use HybridGrad.")
    x = np.stack([(column.values - column.centre) / column.scale for column in kept], axis=1)
    regression = _linear_model().LogisticRegression(C=_C, max_iter=1000).fit(x, wrong)
    return FusedWeights(
        columns=tuple(column.name for column in kept),
        lows=tuple(column.low for column in kept),
        highs=tuple(column.high for column in kept),
        centres=tuple(column.centre for column in kept),
        scales=tuple(column.scale for column in kept),
        weights=tuple(regression.coef_[0].tolist()),
        intercept=float(regression.intercept_[0]),
        n=len(wrong),
        n_wrong=int(wrong.sum()),
    )


class _Column(NamedTuple):
    """A feature, or its logarithm, over all records: what `FusedWeights` keeps of it, and the values."""

    name: str
    low: float
    high: float
    centre: float
    scale: float
    values: NDArray[np.float64]


def _column(name: str, records: Sequence[Features]) -> _Column | None:
    """The column of that name; None where it does not vary."""
    feature = name.removeprefix(LOG)
    raw = np.array([record[feature] for record in records], dtype=np.float64)
    usable = raw[raw > 0] if name != feature else raw
    if not len(usable):
        return None
    low, high = float(usable.min()), float(usable.max())
    values = np.log(np.maximum(raw, low)) if name != feature else raw
    centre, spread = float(values.mean()), float(values.std())
    if spread <= 1e-9 * (1 + abs(centre)):
        return None
    return _Column(name, low, high, centre, spread, values)


def _linear_model() -> Any:
    try:
        return cast(Any, importlib.import_module("sklearn.linear_model"))
    except ImportError:
        raise MissingExtraError("scikit-learn", extra="eval") from None
