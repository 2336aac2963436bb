"""Semantic Entropy: the entropy over the meanings of the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.estimators.equivalence import SHARED_WORDS, Equivalence, clusters
from semgrad_guard.estimators.sampled import AskingEstimator, mean_log_prob, texts_of, with_tokens

_PLAN = Sampling(count=10, temperature=1.0)


@dataclass(frozen=True)
class SemanticEntropy(AskingEstimator):
    """The entropy over clusters of equivalent samples in nats, in [0, log K].

        S = -sum_c p(c) log p(c),    p(c) proportional to the sum of its samples' likelihoods

    The journal version: likelihoods are length-normalised and the cluster probabilities normalised over the clusters
    seen (Rao-Blackwellised). `discrete=True` takes the share of samples instead (the journal's version for models
    without likelihoods). Source: Farquhar et al., "Detecting hallucinations in large language models using semantic
    entropy", Nature 2024. The paper's setting: 10 samples at temperature 1, equivalence by NLI.
    """

    plan: Sampling = _PLAN
    equivalence: Equivalence = SHARED_WORDS
    discrete: bool = False
    name: ClassVar[str] = "semantic_entropy"
    title: ClassVar[str] = "Semantic Entropy"

    def value(self, evidence: Evidence) -> float:
        """The entropy over the clusters of the samples that are not empty."""
        samples = with_tokens(evidence.samples(self.plan))
        numbers = clusters(texts_of(samples), evidence.question, self.equivalence)
        weights = [0.0 if self.discrete else mean_log_prob(sample) for sample in samples]
        return cluster_entropy(numbers, weights)


def cluster_entropy(cluster_of: Sequence[int], log_weights: Sequence[float]) -> float:
    """The entropy over clusters whose probability is proportional to the sum of their members' weights."""
    mass = np.zeros(max(cluster_of) + 1)
    # A common factor cancels, and keeps the largest weight from vanishing.
    np.add.at(mass, list(cluster_of), np.exp(np.array(log_weights) - max(log_weights)))
    shares = (mass / mass.sum()).tolist()
    return math.fsum(-share * math.log(share) for share in shares if share > 0)
