"""LN-PE: length-normalised predictive entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.estimators.sampled import AskingEstimator, mean_log_prob, with_tokens

_PLAN = Sampling(count=10, temperature=1.0)


@dataclass(frozen=True)
class LengthNormalisedEntropy(AskingEstimator):
    """The entropy of answers in nats per token, by samples, >= 0.

        S = -1/K sum_k 1/|s_k| log p(s_k)

    Source: Malinin & Gales, "Uncertainty estimation in autoregressive structured prediction", ICLR 2021, with samples
    of one model in place of an ensemble's. The paper's setting: 10 samples at temperature 1.
    """

    plan: Sampling = _PLAN
    name: ClassVar[str] = "ln_pe"
    title: ClassVar[str] = "LN-PE"

    def value(self, evidence: Evidence) -> float:
        """The mean over the samples that are not empty."""
        return predictive_entropy([mean_log_prob(sample) for sample in with_tokens(evidence.samples(self.plan))])


def predictive_entropy(log_likelihoods: Sequence[float]) -> float:
    """-1/K sum_k log-likelihood_k."""
    return -sum(log_likelihoods) / len(log_likelihoods)
