"""LLM-Check's two scores of one pass: how much tokens attend to themselves, and how widely their states spread.

Source: Sriramanan et al., "LLM-Check: investigating detection of hallucinations in large language
models", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.scoring.observation import Observation
from semgrad_guard.estimators.base import AttendingEstimator, ObservedEstimator


@dataclass(frozen=True)
class AttentionScore(AttendingEstimator):
    """-1/T sum_t 1/H sum_h ln a_h(t, t) of the middle layer, over the answer's tokens; in nats, >= 0.

    The mean log-determinant of the heads' attention matrices, which are triangular, with the sign that makes it grow
    where the answer's tokens look elsewhere. It takes one pass over prompt and answer.
    """

    name: ClassVar[str] = "attention_score"
    title: ClassVar[str] = "Attention score"

    def number(self, log_probs: Sequence[float], previous: Sequence[Sequence[float]], own: Sequence[float]) -> float:
        """That of the layer in the middle of those that were read."""
        return -own[len(own) // 2]


@dataclass(frozen=True)
class HiddenScore(ObservedEstimator):
    """1/T ln det(Z' J Z + .001 I) for the states Z [d, T] of the answer's tokens in a middle layer; any number.

    J centres each state over its d entries. Free with the generation. Where the layers are not known there is none.
    """

    name: ClassVar[str] = "hidden_score"
    title: ClassVar[str] = "Hidden score"

    def value(self, scores: Observation) -> float | None:
        """The mean log eigenvalue of the states' products."""
        return scores.spread
