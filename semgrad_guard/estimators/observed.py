"""The free scores: likelihoods that generating has computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.observed import Observation
from semgrad_guard.estimators.base import Likelihoods, timed
from semgrad_guard.estimators.gradients import ReplayEstimator, likelihoods
from semgrad_guard.records import Score

OBSERVING = Objective(gradients=False)
"""The objective of estimators that differentiate nothing."""


class ObservedEstimator(ReplayEstimator):
    """An estimator that reads its number off an answer's likelihoods, which a replay knows as well."""

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = timed(evidence.observed)
        if seen is None:
            return Score(None, evidence.why_empty)
        return Score.finite(self.value(seen), seen.reason, observed_details(seen, milliseconds))


def observed_details(seen: Observation, milliseconds: float) -> dict[str, Any]:
    """The details of the score of an observed answer."""
    return {**likelihoods(seen), "scored_tokens": len(seen.log_probs), "scoring_ms": round(milliseconds, 3)}


@dataclass(frozen=True)
class GreedyNLL(ObservedEstimator):
    """G-NLL: the greedy answer's negative log-likelihood in nats, >= 0; the end token does not count.

    Source: Aichberger et al., "Rethinking uncertainty estimation in natural language generation", 2024.
    """

    name: ClassVar[str] = "gnll"
    title: ClassVar[str] = "G-NLL"

    def value(self, scores: Likelihoods) -> float | None:
        """-log p(answer)."""
        return scores.greedy_nll


@dataclass(frozen=True)
class MaxProbability(ObservedEstimator):
    """1 - the geometric mean of the answer's token probabilities, in [0, 1].

    The maximum softmax probability of a classifier, carried over to a sequence: a greedy token's probability is the
    largest of its distribution. The mean makes long and short answers comparable; without it the ranks would be those
    of G-NLL. (It ranks like perplexity.)

    Source: Hendrycks & Gimpel, "A baseline for detecting misclassified and out-of-distribution examples", ICLR 2017.
    """

    name: ClassVar[str] = "max_probability"
    title: ClassVar[str] = "Max probability"

    def value(self, scores: Likelihoods) -> float | None:
        """1 - exp(1/T sum_t log p(y_t)), near 0 to full precision."""
        return likelihoods(scores)["max_probability"]


@dataclass(frozen=True)
class MeanEntropy(ObservedEstimator):
    """The mean of the answer's token entropies in nats, >= 0."""

    name: ClassVar[str] = "mean_entropy"
    title: ClassVar[str] = "Mean entropy"

    def value(self, scores: Likelihoods) -> float | None:
        """1/T sum_t H(p_t)."""
        return scores.mean_entropy


@dataclass(frozen=True)
class GreatestEntropy(ObservedEstimator):
    """The greatest of the answer's token entropies in nats, >= 0: one doubtful word is enough.

    Source: Manakul et al., "SelfCheckGPT: zero-resource black-box hallucination detection for generative large language
    models", EMNLP 2023 (its Max(H)).
    """

    name: ClassVar[str] = "greatest_entropy"
    title: ClassVar[str] = "Greatest entropy"

    def value(self, scores: Likelihoods) -> float | None:
        """max_t H(p_t)."""
        return max(scores.entropies) if scores.entropies else None
