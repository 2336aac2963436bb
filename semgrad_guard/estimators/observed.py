"""Likelihoods, states and attention of one pass: the free scores, RAUQ, and LLM-Check's two scores.

Source of the last: Sriramanan et al., "LLM-Check: investigating detection of hallucinations in large language
models", NeurIPS 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.observed import Observation
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.base import Likelihoods
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
        seen, milliseconds = evidence.timed(evidence.observed)
        if seen is None:
            return Score(None, evidence.why_empty)
        return Score.finite(self.value(seen), seen.reason, observed_details(seen, milliseconds))


def observed_details(seen: Observation, milliseconds: float) -> dict[str, Any]:
    """The details of the score of an observed answer."""
    return {**likelihoods(seen), "scored_tokens": len(seen.log_probs), "scoring_ms": round(milliseconds, 3)}


class AttendingEstimator:
    """An estimator of how an answer's tokens attend to each other: one pass over prompt and answer, without a gradient.

    Subclasses combine the attention of the middle layers and the tokens' probabilities, in `number`.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def settings(self) -> dict[str, Any]:
        """Empty unless a subclass has settings."""
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
        return Score.finite(self.number(seen.log_probs, read.previous, read.own), None, details)


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


@dataclass(frozen=True)
class RAUQ(AttendingEstimator):
    """The greatest u_l over the layers of the middle third, in nats per token, >= 0.

        c_1 = p(y_1),    c_t = alpha p(y_t) + (1 - alpha) a_t c_{t-1},    u_l = -1/T sum_t ln c_t

    a_t is what y_t gives y_{t-1} in the layer's head that gives it most over the answer. `alpha` in (0, 1] is .5 in its
    authors' code for models that follow instructions, .2 for others; 1 leaves the mean negative log-likelihood. It
    takes one pass over prompt and answer. Models whose attention cannot be read have no score.

    Source: Vazhentsev et al., "Uncertainty-aware attention heads: efficient unsupervised uncertainty quantification for
    LLMs", 2025 (arXiv 2505.20045).
    """

    alpha: float = 0.5
    name: ClassVar[str] = "rauq"
    title: ClassVar[str] = "RAUQ"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise InputError(f"RAUQ needs an alpha in (0, 1], not {self.alpha}")

    def settings(self) -> dict[str, Any]:
        """`alpha`."""
        return {"alpha": self.alpha}

    def number(self, log_probs: Sequence[float], previous: Sequence[Sequence[float]], own: Sequence[float]) -> float:
        """The greatest of the layers' u_l."""
        return max(recurrent(log_probs, weights, alpha=self.alpha) for weights in previous)


def recurrent(log_probs: Sequence[float], weights: Sequence[float], *, alpha: float) -> float:
    """u_l of one layer: T log-probabilities, and T - 1 weights of the tokens before (from the second token on).

    In logarithms throughout: a confidence below the smallest number is not one of zero.
    """
    confidence = total = log_probs[0]
    for log_p, weight in zip(log_probs[1:], weights, strict=True):
        carried = math.log1p(-alpha) + math.log(weight) + confidence if alpha < 1 and weight > 0 else -math.inf
        high, low = max(math.log(alpha) + log_p, carried), min(math.log(alpha) + log_p, carried)
        confidence = high + math.log1p(math.exp(low - high))
        total += confidence
    return max(0.0, -total / len(log_probs))


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
