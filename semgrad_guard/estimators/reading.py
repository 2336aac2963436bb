"""Estimators that have the model, or another one, read texts: P(True), mutual information, SAR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.text_units import token_f1
from semgrad_guard.errors import InputError, ScoringError
from semgrad_guard.estimators.samples import AskingEstimator, distinct, texts_of, with_tokens
from semgrad_guard.estimators.text_pairs import F1Equivalence, Pair, clusters

_QUESTION = """Question: {question}
Proposed Answer: {answer}
Is the proposed answer:
 (A) True
 (B) False
The proposed answer is:"""

_TRUE, _FALSE = ("True", "(A)"), ("False", "(B)")


@dataclass(frozen=True)
class PTrue(AskingEstimator):
    """1 - the probability that the model calls its own answer true, in [0, 1].

    The original prompt, through the model's own chat template as a new conversation. An answer may begin with
    "True" or "(A)", with "False" or "(B)"; each side's probability is the sum over its two forms, divided by the
    sum of both sides, so that a model that likes to begin otherwise is not called uncertain. No examples come before
    it, where the paper's published code shows six on a raw prompt. Source: Kadavath et al., "Language models (mostly)
    know what they know", 2022.
    """

    name: ClassVar[str] = "p_true"
    title: ClassVar[str] = "P(True)"

    def value(self, evidence: Evidence) -> float:
        """Read off one pass over the questions about all answers of the batch."""
        likelihoods = evidence.together(self, self._ask)
        if likelihoods is None:
            raise ScoringError("the question about the answer does not fit the context window")
        return p_false(*likelihoods)

    def _ask(self, batch: Sequence[Evidence]) -> list[tuple[list[float], list[float]] | None]:
        """For each answer the log-probabilities of the forms of "true" and of "false", None where they do not fit."""
        model = batch[0].model
        prompts = [
            model.render(_QUESTION.format(question=answer.question_in_context, answer=answer.text.strip()))
            for answer in batch
        ]
        # Templates that end in white space (a new line after the role) take the word as it is, others after a blank.
        lead = ["" if prompt.text[-1:].isspace() else " " for prompt in prompts]
        found: list[tuple[list[float], list[float]] | None] = []
        for prompt, before in zip(prompts, lead, strict=True):
            forms = [model.encode(before + form) for form in (*_TRUE, *_FALSE)]
            if model.fits(prompt, max(map(len, forms))):
                likelihoods = [math.fsum(reading.log_probs) for reading in model.read(prompt, forms)]
                found.append((likelihoods[: len(_TRUE)], likelihoods[len(_TRUE) :]))
            else:
                found.append(None)
        return found


def p_false(true: Sequence[float], false: Sequence[float]) -> float:
    """p(false) / (p(true) + p(false)) from the log-probabilities of the forms of either side."""
    odds = float(np.logaddexp.reduce(true)) - float(np.logaddexp.reduce(false))
    return float(np.exp(-np.logaddexp(0.0, odds)))


_FIRST_ANSWER = """Consider the following question:
Q: {question}
One answer to question Q is {answer}.
Provide an answer to the following question:
Q: {question}
A:"""

_WARM = Sampling(count=10, temperature=0.9)


@dataclass(frozen=True)
class MutualInformation(AskingEstimator):
    """The mutual information of two answers of which the second is given with the first in the prompt, in nats, >= 0.

        S = sum_{i,t} m(i, t) log(m(i, t) / m'(i, t))
        m(i, t) = p(i) p(t | i),    m'(i, t) = p(i) sum_j p(j) p(t | j)

    over clusters of the distinct samples, whose likelihoods add up (each cluster takes the samples that are similar to
    its first member and in no earlier cluster). Both p are normalised over the clusters seen. p(t | i) is the
    likelihood of the same samples after the paper's prompt F_1, "Consider the following question: Q: ... One answer to
    question Q is ... Provide an answer to the following question: Q: ... A:", put to the model as one user turn.
    Nothing is sampled a second time. Likelihoods leave the end token out, as everywhere here. Source: Abbasi-Yadkori et
    al., "To believe or not to believe your LLM", NeurIPS 2024, Algorithm 3 (n = 2). The paper's setting: 10 samples at
    temperature 0.9, similar where F1 > 0.25, no damping (gamma1 = gamma2 = 0).
    """

    plan: Sampling = _WARM
    f1: float = 0.25
    name: ClassVar[str] = "mutual_information"
    title: ClassVar[str] = "M.I."

    def __post_init__(self) -> None:
        F1Equivalence(self.f1)

    def value(self, evidence: Evidence) -> float:
        """Algorithm 3 over the distinct samples that are not empty."""
        samples = distinct(with_tokens(evidence.samples(self.plan)))
        cluster_of = clusters(list(samples), evidence.question, F1Equivalence(self.f1))
        heads = [cluster_of.index(number) for number in range(max(cluster_of) + 1)]
        if len(heads) == 1:
            return 0.0
        answers = [sample.ids for sample in samples.values()]
        model, texts = evidence.model, list(samples)
        question = evidence.question_in_context
        prompts = [model.render(_FIRST_ANSWER.format(question=question, answer=texts[i])) for i in heads]
        if not all(model.fits(prompt, max(map(len, answers))) for prompt in prompts):
            raise ScoringError("the question with a first answer in it does not fit the context window")
        second = [model.read(prompt, answers) for prompt in prompts]
        return mutual_information(
            cluster_of,
            np.array([math.fsum(sample.log_probs) for sample in samples.values()]),
            np.array([[math.fsum(reading.log_probs) for reading in row] for row in second]),
        )


def mutual_information(cluster_of: Sequence[int], first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Algorithm 3 from log-likelihoods: of each answer [k], and of each after each cluster's first member [c, k]."""
    member = np.eye(max(cluster_of) + 1)[list(cluster_of)]
    marginal = _normalised(first[None], member)[0]
    conditional = _normalised(second, member)
    joint = marginal[:, None] * conditional
    product = marginal[:, None] * (marginal @ conditional)[None, :]
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / product[there])).sum())


def _normalised(log_likelihoods: NDArray[np.float64], member: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cluster probabilities [rows, c] from log-likelihoods [rows, k] and who is in which cluster [k, c]."""
    mass = np.exp(log_likelihoods - log_likelihoods.max(axis=1, keepdims=True)) @ member
    return mass / mass.sum(axis=1, keepdims=True)


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


_FIVE = Sampling(count=5, temperature=1.0)


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

    plan: Sampling = _FIVE
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
        question, decode = evidence.question, evidence.model.decode
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
