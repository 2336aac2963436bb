"""M.I.: does a first answer, put into the prompt, change the second?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.errors import InputError, ScoringError
from semgrad_guard.estimators.equivalence import F1Equivalence, clusters
from semgrad_guard.estimators.samples import AskingEstimator, distinct, with_tokens

_PROMPT = """Consider the following question:
Q: {question}
One answer to question Q is {answer}.
Provide an answer to the following question:
Q: {question}
A:"""

_PLAN = Sampling(count=10, temperature=0.9)


@dataclass(frozen=True)
class MutualInformation(AskingEstimator):
    """The mutual information of two answers of which the second is given with the first in the prompt, in nats, >= 0.

        S = sum_{i,t} m(i, t) log((m(i, t) + gamma1) / (m'(i, t) + gamma2))
        m(i, t) = p(i) p(t | i),    m'(i, t) = p(i) sum_j p(j) p(t | j)

    over clusters of the distinct samples, whose likelihoods add up (each cluster takes the samples that are similar to
    its first member and in no earlier cluster). Both p are normalised over the clusters seen. p(t | i) is the
    likelihood of the same samples after the paper's prompt F_1, "Consider the following question: Q: ... One answer to
    question Q is ... Provide an answer to the following question: Q: ... A:", put to the model as one user turn.
    Nothing is sampled a second time. Likelihoods leave the end token out, as everywhere here. Source: Abbasi-Yadkori et
    al., "To believe or not to believe your LLM", NeurIPS 2024, Algorithm 3 (n = 2). The paper's setting: 10 samples at
    temperature 0.9, similar where F1 > 0.25, gamma1 = gamma2 = 0.
    """

    plan: Sampling = _PLAN
    f1: float = 0.25
    gamma1: float = 0.0
    gamma2: float = 0.0
    name: ClassVar[str] = "mutual_information"
    title: ClassVar[str] = "M.I."

    def __post_init__(self) -> None:
        if not (self.gamma1 >= 0 and self.gamma2 >= 0):
            raise InputError(f"M.I. needs gamma1 and gamma2 >= 0, not {self.gamma1} and {self.gamma2}")
        F1Equivalence(self.f1)

    def value(self, evidence: Evidence) -> float:
        """Algorithm 3 over the distinct samples that are not empty."""
        samples = distinct(with_tokens(evidence.samples(self.plan)))
        cluster_of = clusters(list(samples), evidence.question, F1Equivalence(self.f1))
        heads = [cluster_of.index(number) for number in range(max(cluster_of) + 1)]
        if len(heads) == 1:
            return 0.0
        answers = [sample.ids for sample in samples.values()]
        sampler, texts = evidence.sampler, list(samples)
        question = evidence.question_in_context
        prompts = [sampler.render(_PROMPT.format(question=question, answer=texts[i])) for i in heads]
        if not all(sampler.fits(prompt, max(map(len, answers))) for prompt in prompts):
            raise ScoringError("the question with a first answer in it does not fit the context window")
        before = [[sampler.unthought(prompt)] * len(answers) for prompt in prompts]
        second = sampler.read(prompts, [answers] * len(prompts), before=before)
        return mutual_information(
            cluster_of,
            np.array([math.fsum(sample.log_probs) for sample in samples.values()]),
            np.array([[math.fsum(reading.log_probs) for reading in row] for row in second]),
            gamma1=self.gamma1,
            gamma2=self.gamma2,
        )


def mutual_information(
    cluster_of: Sequence[int],
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    *,
    gamma1: float = 0.0,
    gamma2: float = 0.0,
) -> float:
    """Algorithm 3 from log-likelihoods: of each answer [k], and of each after each cluster's first member [c, k]."""
    member = np.eye(max(cluster_of) + 1)[list(cluster_of)]
    marginal = _normalised(first[None], member)[0]
    conditional = _normalised(second, member)
    joint = marginal[:, None] * conditional
    product = marginal[:, None] * (marginal @ conditional)[None, :]
    there = joint > 0
    return float((joint[there] * np.log((joint[there] + gamma1) / (product[there] + gamma2))).sum())


def _normalised(log_likelihoods: NDArray[np.float64], member: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cluster probabilities [rows, c] from log-likelihoods [rows, k] and who is in which cluster [k, c]."""
    mass = np.exp(log_likelihoods - log_likelihoods.max(axis=1, keepdims=True)) @ member
    return mass / mass.sum(axis=1, keepdims=True)
