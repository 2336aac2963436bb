"""FusedGrad and FusedStates: all numbers of one answer, weighed by a logistic regression on graded answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from semgrad_guard.declared import plain_fields
from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.estimators.gradients import read_off
from semgrad_guard.estimators.learned import (
    LearnedEstimator,
    Shrinkage,
    observed_features,
    replay_features,
)
from semgrad_guard.estimators.observed import OBSERVING, observed_details
from semgrad_guard.records import FusedWeights, Score


@dataclass(frozen=True)
class FusedGrad(LearnedEstimator):
    """ln P(wrong) / P(correct), any real number, by a logistic regression on the numbers of one replay.

    The score is the logit and not a probability: thresholds and the drift test need a continuous scale, and P(correct)
    comes from the calibration, as for every estimator.

    Without `weights` it only collects features (every score is None, with the reason); `FusedGrad().fitted(records,
    correct)` makes one that scores. The default reads the ordinary replay, at no extra cost. With every layer in
    `layers` and `last_tokens=8` it reads the whole grid of gradients, for which the replay begins earlier and lower.
    `variant`, `layers` and `last_tokens` are those of `Objective`. The weights mean nothing for another model:
    calibrations bind both.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    last_tokens: int | None = None
    weights: FusedWeights | None = None
    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "FusedGrad"
    shrinkage: ClassVar[Shrinkage] = Shrinkage(c=0.3)  # docs/results/fused.md compares others

    def __post_init__(self) -> None:
        plain_fields(self)

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


@dataclass(frozen=True)
class FusedStates(LearnedEstimator):
    """ln P(wrong) / P(correct), any real number, from likelihoods and a middle layer's mean state over the answer.

    The state is averaged over the positions of the answer's own tokens: of a short answer the last one tells most, and
    it predicts nothing that the answer holds. No gradient is computed. Generating has read all of these tokens but the
    last one of an answer that a limit cut off: such an answer takes one more pass. Without `weights`
    it only collects features (every score is None, with the reason); `FusedStates().fitted(records, correct)` scores.
    The weights mean nothing for another model: calibrations bind both. Weights of states are worth little on questions
    of another kind, so it leans on the likelihoods as far as the labels do not speak against it (`Shrinkage`).

    Probes of hidden states: Azaria & Mitchell, "The internal state of an LLM knows when it's lying", 2023. With strong
    shrinkage a hundred labels are enough.
    """

    weights: FusedWeights | None = None
    name: ClassVar[str] = "states"
    title: ClassVar[str] = "FusedStates"
    shrinkage: ClassVar[Shrinkage] = Shrinkage(c=1.7, plain=1 / 6, yields=0.02)

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def settings(self) -> dict[str, Any]:
        """The id of the fitted numbers."""
        return {"weights": None if self.weights is None else self.weights.id}

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = evidence.timed(lambda: evidence.observed(own=True))
        if seen is None:
            return Score(None, evidence.why_empty)
        details = observed_details(seen, milliseconds)
        if not seen.state:
            return Score(None, seen.reason or "this architecture's layers are not known, so there is no state", details)
        features = observed_features(seen)
        number, reason = self.uncertainty(features)
        return Score(number, reason, details, features)
