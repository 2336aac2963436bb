"""FusedGrad: all numbers of one replay, weighed by a logistic regression on graded answers of the model at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.estimators.base import read_off
from semgrad_guard.estimators.learned import Features, LearnedEstimator, Shrinkage, replay_features
from semgrad_guard.records import FusedWeights, Score


@dataclass(frozen=True)
class FusedGrad(LearnedEstimator):
    """ln P(wrong) / P(correct), any real number, by a logistic regression on the numbers of one replay.

    The score is the logit and not a probability: thresholds and the drift test need a continuous scale, and P(correct)
    comes from the calibration, as for every estimator.

    Without `weights` it only collects features (every score is None, with the reason); `FusedGrad.fit` makes one that
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
    shrinkage: ClassVar[Shrinkage] = Shrinkage(c=0.3)  # docs/results/fused.md compares others

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
        """One that is fitted on graded answers (see `fitted`).

        Args:
            records: each answer's `Score.features`.
            correct: True or False (or 1 or 0) per answer.
            variant, layers, last_tokens: the settings of the collected features.

        Raises:
            FitError, MissingExtraError: as `fitted`.
        """
        return cls(variant, layers, last_tokens).fitted(records, correct)

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
            return Score(None, evidence.why_empty)
        features = replay_features(timed.scores)
        number, reason = self.uncertainty(features)
        parts = read_off(evidence, self.objective, lambda _: number)
        return Score(number, parts.reason if features is None else reason, parts.details, features)
