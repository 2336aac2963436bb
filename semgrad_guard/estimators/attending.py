"""Estimators of how an answer's tokens attend to each other: one pass over prompt and answer, no gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.estimators.observed import OBSERVING, observed_details
from semgrad_guard.records import Score


class AttendingEstimator:
    """What is made of the attention of the middle layers and of the tokens' probabilities: subclasses say it."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def settings(self) -> dict[str, Any]:
        """None unless a subclass has some."""
        return {}

    def number(self, log_probs: Sequence[float], previous: Sequence[Sequence[float]], own: Sequence[float]) -> float:
        """From log-probabilities (nats) and an `AttentionReading`."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        (seen, read), milliseconds = evidence.timed(lambda: (evidence.observed(), evidence.attention()))
        if seen is None or read is None:
            return Score(None, evidence.why_empty)
        details = observed_details(seen, milliseconds)
        if reason := seen.reason or read.reason:
            return Score(None, reason, details)
        found = self.number(seen.log_probs, read.previous, read.own)
        return Score(found, None, details) if math.isfinite(found) else Score(None, "the score is not finite", details)
