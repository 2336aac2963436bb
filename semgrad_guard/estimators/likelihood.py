"""The baselines that come free with every replay: G-NLL, maximum probability and mean token entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.scoring.scores import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator


@dataclass(frozen=True)
class GreedyNLL(ReplayEstimator):
    """G-NLL: the greedy answer's negative log-likelihood in nats, >= 0; the end token does not count.

    Source: Aichberger et al., "Rethinking uncertainty estimation in natural language generation", 2024.
    """

    name: ClassVar[str] = "gnll"
    title: ClassVar[str] = "G-NLL"

    def value(self, scores: GradientScores) -> float | None:
        """-log p(answer)."""
        return scores.greedy_nll


@dataclass(frozen=True)
class MaxProbability(ReplayEstimator):
    """1 - the geometric mean of the answer's token probabilities, in [0, 1].

    The maximum softmax probability of a classifier, carried over to a sequence: a greedy token's probability is the
    largest of its distribution. The mean makes long and short answers comparable; without it the ranks would be those
    of G-NLL. (It ranks like perplexity.)

    Source: Hendrycks & Gimpel, "A baseline for detecting misclassified and out-of-distribution examples", ICLR 2017.
    """

    name: ClassVar[str] = "max_probability"
    title: ClassVar[str] = "Max probability"

    def value(self, scores: GradientScores) -> float | None:
        """1 - exp(1/T sum_t log p(y_t)), near 0 to full precision."""
        if scores.greedy_nll is None:
            return None
        return -math.expm1(-scores.greedy_nll / len(scores.log_probs))


@dataclass(frozen=True)
class MeanEntropy(ReplayEstimator):
    """The mean of the answer's token entropies in nats, >= 0."""

    name: ClassVar[str] = "mean_entropy"
    title: ClassVar[str] = "Mean entropy"

    def value(self, scores: GradientScores) -> float | None:
        """1/T sum_t H(p_t)."""
        return scores.mean_entropy
