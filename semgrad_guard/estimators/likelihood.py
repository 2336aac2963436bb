"""The two baselines that come free with every replay: G-NLL and mean token entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.scores import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator


@dataclass(frozen=True)
class GreedyNLL(ReplayEstimator):
    """G-NLL: the greedy answer's negative log-likelihood in nats, >= 0; the end token does not count.

    Source: Aichberger et al., "Rethinking uncertainty estimation in natural language generation", 2024.
    """

    name: ClassVar[str] = "gnll"

    def value(self, scores: GradientScores) -> float | None:
        """-log p(answer)."""
        return scores.greedy_nll


@dataclass(frozen=True)
class MeanEntropy(ReplayEstimator):
    """The mean of the answer's token entropies in nats, >= 0."""

    name: ClassVar[str] = "mean_entropy"

    def value(self, scores: GradientScores) -> float | None:
        """1/T sum_t H(p_t)."""
        return scores.mean_entropy
