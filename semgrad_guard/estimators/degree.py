"""Deg: the degree matrix of the samples' similarity graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.estimators.equivalence import SHARED_WORDS, Equivalence
from semgrad_guard.estimators.sampled import AskingEstimator, texts_of

_PLAN = Sampling(count=10, temperature=0.7)


@dataclass(frozen=True)
class Degree(AskingEstimator):
    """How unlike each other the samples are, in [0, 1 - 1/m].

        S = trace(m I - D) / m^2,    D_ii = sum_j W_ij,    W_ij = p(s_i entails s_j), both directions' mean, W_ii = 1

    Source: Lin et al., "Generating with confidence: uncertainty quantification for black-box large language models",
    TMLR 2024. The paper's setting: that of Self-Consistency.
    """

    plan: Sampling = _PLAN
    equivalence: Equivalence = SHARED_WORDS
    name: ClassVar[str] = "deg"
    title: ClassVar[str] = "Deg"

    def value(self, evidence: Evidence) -> float:
        """The mean dissimilarity of all ordered pairs of samples; equal texts are alike without a comparison."""
        texts = texts_of(evidence.samples(self.plan))
        distinct = list(dict.fromkeys(texts))
        pairs = [(i, j) for i in range(len(distinct)) for j in range(i)]
        relations = self.equivalence.relations([(distinct[i], distinct[j]) for i, j in pairs], evidence.question)
        similarity = np.eye(len(distinct))
        for (i, j), scores in zip(pairs, relations, strict=True):
            similarity[i, j] = similarity[j, i] = scores.entailment
        rows = [distinct.index(text) for text in texts]
        return degree_uncertainty(similarity[np.ix_(rows, rows)])


def degree_uncertainty(similarity: NDArray[np.float64]) -> float:
    """trace(m I - D) / m^2 of a similarity matrix [m, m] with entries in [0, 1]."""
    size = len(similarity)
    return float(np.trace(size * np.eye(size) - np.diag(similarity.sum(axis=1)))) / size**2
