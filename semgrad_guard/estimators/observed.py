"""Estimators of what generating an answer has computed anyway: no gradient, no replay."""

from __future__ import annotations

import math
from typing import Any

from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scoring.observation import Observation
from semgrad_guard.estimators.base import ReplayEstimator, likelihoods
from semgrad_guard.records import Score

OBSERVING = Objective(gradients=False)
"""What such an estimator asks a generation to keep."""


class ObservedEstimator(ReplayEstimator):
    """An estimator that reads its number off an answer's likelihoods, which a replay knows as well."""

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = evidence.timed(evidence.observed)
        if seen is None:
            return Score(None, evidence.why_empty)
        number, details = self.value(seen), observed_details(seen, milliseconds)
        if number is None or not math.isfinite(number):
            return Score(None, seen.reason or "the score is not finite", details)
        return Score(number, None, details)


def observed_details(seen: Observation, milliseconds: float) -> dict[str, Any]:
    """What stands beside the score of an answer that was observed."""
    return {**likelihoods(seen), "scored_tokens": len(seen.log_probs), "scoring_ms": round(milliseconds, 3)}
