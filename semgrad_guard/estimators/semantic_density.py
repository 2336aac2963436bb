"""Semantic Density: how dense the answers are, in meaning, around the given one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import DiverseBeams, SamplingPlan
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.equivalence import SHARED_WORDS, Equivalence
from semgrad_guard.estimators.sampled import AskingEstimator, distinct, mean_log_prob, with_tokens

_PLAN = DiverseBeams(count=10, penalty=1.0)


@dataclass(frozen=True)
class SemanticDensity(AskingEstimator):
    """1 - the density of reference answers around the answer, in [0, 1].

        S = 1 - sum_i p_i K(d_i) / sum_i p_i,    K(d) = max(0, 1 - d^2),    d_i^2 = p(contradiction) + p(neutral) / 2

    `p_i` is the length-normalised likelihood of a distinct reference answer with logits renormalised at `temperature`,
    `K` the Epanechnikov kernel without its constant, `d_i^2` the expected squared distance by NLI, both directions'
    mean. Source: Qiu & Miikkulainen, "Semantic density: uncertainty quantification for large language models through
    confidence measurement in semantic space", NeurIPS 2024, Algorithm 1. The paper's setting: 10 groups of diverse
    beam search with penalty 1.0 (the greedy answer is the first of them), temperature 0.1.
    """

    plan: SamplingPlan = _PLAN
    equivalence: Equivalence = SHARED_WORDS
    temperature: float = 0.1
    name: ClassVar[str] = "semantic_density"
    title: ClassVar[str] = "Semantic Density"

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"Semantic Density needs temperature > 0, not {self.temperature}")

    def value(self, evidence: Evidence) -> float:
        """1 - density; a reference that equals the answer is at distance 0 without a comparison."""
        samples = with_tokens(evidence.samples(self.plan, temperature=self.temperature))
        answer, references = evidence.text.strip(), distinct(samples)
        others = [text for text in references if text != answer]
        relations = self.equivalence.relations([(answer, other) for other in others], evidence.question)
        distances = {answer: 0.0} | {o: r.contradiction + r.neutral / 2 for o, r in zip(others, relations, strict=True)}
        likelihoods = [mean_log_prob(sample) for sample in references.values()]
        return 1 - density([distances[text] for text in references], likelihoods)


def density(squared_distances: Sequence[float], log_likelihoods: Sequence[float]) -> float:
    """sum_i p_i K(d_i) / sum_i p_i, in [0, 1], for references at these squared distances."""
    peak = max(log_likelihoods)
    weights = [math.exp(value - peak) for value in log_likelihoods]
    inside = math.fsum(w * max(0.0, 1 - d) for w, d in zip(weights, squared_distances, strict=True))
    return inside / math.fsum(weights)
