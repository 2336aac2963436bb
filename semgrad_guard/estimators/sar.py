"""SAR: uncertainty shifted to the tokens and sentences that matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.text_pairs import Pair
from semgrad_guard.engine.words import token_f1
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.samples import AskingEstimator, texts_of, with_tokens


class Similarity(Protocol):
    """How alike two texts are, in [0, 1]; `CrossEncoder` is one."""

    @property
    def name(self) -> str:
        """Its name in settings."""
        ...

    def similarities(self, pairs: Sequence[Pair]) -> list[float]:
        """One number for each pair."""
        ...


@dataclass(frozen=True)
class WordOverlap:
    """Similarity by shared words (F1), where no cross-encoder is at hand."""

    @property
    def name(self) -> str:
        return "token-f1"

    def similarities(self, pairs: Sequence[Pair]) -> list[float]:
        return [1.0 if first == second else token_f1(first, second) for first, second in pairs]


_PLAN = Sampling(count=5, temperature=1.0)


@dataclass(frozen=True)
class SAR(AskingEstimator):
    """Shifting attention to relevance, of tokens and of sentences; any real number.

        E_T(s) = -sum_i R_i log p(z_i),    R_i = (1 - g(x s, x s without z_i)) / (their sum)
        S = 1/K sum_j -log(p'_j + 1/t sum_{k != j} g(x s_j, x s_k) p'_k),    p'_j = exp(-E_T(s_j))

    with g the `similarity`, read after the question x in both places as in the published code. Tokens that all change
    nothing count alike. Source: Duan et al., "Shifting attention to relevance: towards the predictive uncertainty
    quantification of free-form large language models", ACL 2024. The paper's setting: 5 samples at temperature 1,
    cross-encoder/stsb-roberta-large; t = 0.001.
    """

    plan: Sampling = _PLAN
    similarity: Similarity = WordOverlap()
    t: float = 1e-3
    name: ClassVar[str] = "sar"
    title: ClassVar[str] = "SAR"

    def __post_init__(self) -> None:
        if not self.t > 0:
            raise InputError(f"SAR needs t > 0, not {self.t}")

    def value(self, evidence: Evidence) -> float:
        """Over the samples that are not empty."""
        samples = with_tokens(evidence.samples(self.plan))
        question, decode = evidence.question, evidence.sampler.decode
        # 1 - g(with, without) for every token of every sample, all in one call.
        pairs = [
            (f"{question} {s.text.strip()}", f"{question} {decode(s.ids[:i] + s.ids[i + 1 :]).strip()}")
            for s in samples
            for i in range(len(s.ids))
        ]
        values = iter(self.similarity.similarities(pairs))
        relevances = [[1 - next(values) for _ in sample.ids] for sample in samples]
        energies = [relevant_energy(s.log_probs, own) for s, own in zip(samples, relevances, strict=True)]
        # g of every pair of samples.
        texts = [f"{question} {text}" for text in texts_of(samples)]
        pairs = [(first, second) for i, first in enumerate(texts) for second in texts[:i]]
        one_way = dict(zip(pairs, self.similarity.similarities(pairs), strict=True))
        both = one_way | {(second, first): value for (first, second), value in one_way.items()}
        return sentence_sar(energies, [[both.get((a, b), 1.0) for b in texts] for a in texts], t=self.t)


def relevant_energy(log_probs: Sequence[float], relevance: Sequence[float]) -> float:
    """E_T: the negative log-probabilities, weighted by relevance (>= 0) that is made to add up to 1."""
    total = math.fsum(relevance)
    shares = [value / total for value in relevance] if total > 0 else [1 / len(log_probs)] * len(log_probs)
    return -math.fsum(share * log_prob for share, log_prob in zip(shares, log_probs, strict=True))


def sentence_sar(energies: Sequence[float], similarity: Sequence[Sequence[float]], *, t: float) -> float:
    """The mean over the samples of -log(p'_j + 1/t sum_{k != j} g_jk p'_k) for p' = exp(-energy)."""
    factors = np.array(similarity, dtype=np.float64) / t
    np.fill_diagonal(factors, 1.0)
    with np.errstate(divide="ignore"):  # texts that share nothing add nothing
        terms = np.log(factors) - np.array(energies, dtype=np.float64)
    return float(-np.logaddexp.reduce(terms, axis=1).mean())
