"""FusedStates: by-products of generating an answer, weighed by a logistic regression on graded answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.estimators.base import OBSERVING, observed_details
from semgrad_guard.estimators.learned import PREDICTING_STATE, STATE, LearnedEstimator, Shrinkage, observed_features
from semgrad_guard.records import FusedWeights, Score


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
        """The id of the fitted numbers, and whose states they are; earlier calibrations know the id alone."""
        weights = {"weights": None if self.weights is None else self.weights.id}
        return {**weights, "states": "own"} if self._own else weights

    @property
    def _own(self) -> bool:
        return self.weights is None or any(name.startswith(STATE) for name in self.weights.columns)

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = evidence.timed(lambda: evidence.observed(own=self._own))
        if seen is None:
            return Score(None, evidence.why_empty)
        details = observed_details(seen, milliseconds)
        if not seen.state:
            return Score(None, seen.reason or "this architecture's layers are not known, so there is no state", details)
        features = observed_features(seen, state=STATE if self._own else PREDICTING_STATE)
        number, reason = self.uncertainty(features)
        return Score(number, reason, details, features)
