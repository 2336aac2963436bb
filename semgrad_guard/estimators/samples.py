"""The base of estimators that draw more answers of the model, and those of how far the samples are apart.

Apart in meaning, likelihood or state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.answers.options import DiverseBeams, Sample, Sampling, SamplingPlan, plan_record
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import DetachedRecordError, InputError, ScoringError
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.text_pairs import SHARED_WORDS, Equivalence, clusters
from semgrad_guard.records import Score


class AskingEstimator:
    """An estimator that draws samples, or puts a question about the answer to the model. Subclasses define `value`."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated; the generator may keep the states of the default objective."""
        return Objective()

    def settings(self) -> dict[str, Any]:
        """The dataclass fields: plans as their settings, auxiliary models by name."""
        own: Any = self  # every estimator is a dataclass
        return {field.name: _plain(getattr(self, field.name)) for field in fields(own)}

    def value(self, evidence: Evidence) -> float:
        """The estimator's number for an answer that is not empty.

        Raises:
            ScoringError: there is none; the message is the score's reason.
        """
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        if not evidence.response_ids:
            return Score(None, evidence.why_empty)

        def attempt() -> tuple[float | None, str | None]:
            try:
                return self.value(evidence), None
            except DetachedRecordError:  # about the record, not the answer
                raise
            except ScoringError as error:
                return None, str(error)

        (value, reason), milliseconds = timed(attempt)
        details = {"scored_tokens": len(evidence.response_ids), "scoring_ms": round(milliseconds, 3)}
        return Score.finite(value, reason, details)


def texts_of(samples: Iterable[Sample]) -> list[str]:
    """The samples' texts without outer white space."""
    return [sample.text.strip() for sample in samples]


def distinct(samples: Iterable[Sample]) -> dict[str, Sample]:
    """The first sample of each text, in order."""
    by_text: dict[str, Sample] = {}
    for sample in samples:
        by_text.setdefault(sample.text.strip(), sample)
    return by_text


def with_tokens(samples: tuple[Sample, ...]) -> list[Sample]:
    """The samples that have a likelihood: the end token is never scored, so an empty sample has none.

    Raises:
        ScoringError: all of them are empty.
    """
    filled = [sample for sample in samples if sample.ids]
    if not filled:
        raise ScoringError("all samples are empty")
    return filled


def mean_log_prob(sample: Sample) -> float:
    """The length-normalised log-likelihood in nats per token."""
    return math.fsum(sample.log_probs) / len(sample.log_probs)


def _plain(value: Any) -> Any:
    if isinstance(value, Sampling | DiverseBeams):
        return plan_record(value)
    return value if value is None or isinstance(value, bool | int | float | str) else value.name


_AT_ONE = Sampling(count=10, temperature=1.0)
_COOLER = Sampling(count=10, temperature=0.7)
_BEAMS = DiverseBeams(count=10, penalty=1.0)
_NARROW = Sampling(count=10, temperature=0.5, top_p=0.99, top_k=5)


@dataclass(frozen=True)
class LengthNormalisedEntropy(AskingEstimator):
    """The entropy of answers in nats per token, by samples, >= 0.

        S = -1/K sum_k 1/|s_k| log p(s_k)

    Source: Malinin & Gales, "Uncertainty estimation in autoregressive structured prediction", ICLR 2021, with samples
    of one model in place of an ensemble's. The paper's setting: 10 samples at temperature 1.
    """

    plan: Sampling = _AT_ONE
    name: ClassVar[str] = "ln_pe"
    title: ClassVar[str] = "LN-PE"

    def value(self, evidence: Evidence) -> float:
        """The mean over the samples that are not empty."""
        samples = with_tokens(evidence.samples(self.plan))
        return -math.fsum(map(mean_log_prob, samples)) / len(samples)


@dataclass(frozen=True)
class SemanticEntropy(AskingEstimator):
    """The entropy over clusters of equivalent samples in nats, in [0, log K].

        S = -sum_c p(c) log p(c),    p(c) proportional to the sum of its samples' likelihoods

    The journal version: likelihoods are length-normalised and the cluster probabilities normalised over the clusters
    seen (Rao-Blackwellised). Source: Farquhar et al., "Detecting hallucinations in large language models using semantic
    entropy", Nature 2024. The paper's setting: 10 samples at temperature 1, equivalence by NLI.
    """

    plan: Sampling = _AT_ONE
    equivalence: Equivalence = SHARED_WORDS
    name: ClassVar[str] = "semantic_entropy"
    title: ClassVar[str] = "Semantic Entropy"

    def value(self, evidence: Evidence) -> float:
        """The entropy over the clusters of the samples that are not empty."""
        samples = with_tokens(evidence.samples(self.plan))
        numbers = clusters(texts_of(samples), evidence.question, self.equivalence)
        return cluster_entropy(numbers, [mean_log_prob(sample) for sample in samples])


def cluster_entropy(cluster_of: Sequence[int], log_weights: Sequence[float]) -> float:
    """The entropy over clusters whose probability is proportional to the sum of their members' weights."""
    mass = np.zeros(max(cluster_of) + 1)
    # A common factor cancels, and keeps the largest weight from vanishing.
    np.add.at(mass, list(cluster_of), np.exp(np.array(log_weights) - max(log_weights)))
    shares = (mass / mass.sum()).tolist()
    return math.fsum(-share * math.log(share) for share in shares if share > 0)


@dataclass(frozen=True)
class SelfConsistency(AskingEstimator):
    """The share of samples that are not equivalent to the answer, in [0, 1].

    Source: Wang et al., "Self-consistency improves chain of thought reasoning in language models", ICLR 2023. The
    paper's setting: 10 samples at temperature 0.7, equivalence by NLI.
    """

    plan: Sampling = _COOLER
    equivalence: Equivalence = SHARED_WORDS
    name: ClassVar[str] = "self_consistency"
    title: ClassVar[str] = "Self-Con"

    def value(self, evidence: Evidence) -> float:
        """1 - the share of equivalent samples; equal texts are equivalent without a comparison."""
        answer, texts = evidence.text.strip(), texts_of(evidence.samples(self.plan))
        others = [text for text in dict.fromkeys(texts) if text != answer]
        same = self.equivalence([(answer, other) for other in others], evidence.question)
        agreeing = {answer, *(other for other, agrees in zip(others, same, strict=True) if agrees)}
        return 1 - sum(text in agreeing for text in texts) / len(texts)


@dataclass(frozen=True)
class Degree(AskingEstimator):
    """How unlike each other the samples are, in [0, 1 - 1/m].

        S = trace(m I - D) / m^2,    D_ii = sum_j W_ij,    W_ij = p(s_i entails s_j), both directions' mean, W_ii = 1

    Source: Lin et al., "Generating with confidence: uncertainty quantification for black-box large language models",
    TMLR 2024. The paper's setting: that of Self-Consistency.
    """

    plan: Sampling = _COOLER
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

    plan: SamplingPlan = _BEAMS
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


@dataclass(frozen=True)
class Inside(AskingEstimator):
    """Differential entropy of the samples in the model's own embedding space; any real number.

        S = 1/K sum_i log lambda_i(Sigma + alpha I)

    `Sigma` [K, K] is the covariance between the samples' embeddings over their d dimensions (divided by d - 1, as in
    the published code), an embedding the middle layer's state of the sample's last token before the end token. The
    logarithm is natural; the published code takes it to base 10, a constant factor. Feature clipping is left out, as
    in the paper's comparison. Source: Chen et al., "INSIDE: LLMs' internal states retain the power of hallucination
    detection", ICLR 2024. The paper's setting: 10 samples, temperature 0.5, top-p 0.99, top-k 5; alpha = 0.001.
    """

    plan: Sampling = _NARROW
    alpha: float = 1e-3
    name: ClassVar[str] = "inside"
    title: ClassVar[str] = "INSIDE"

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise InputError(f"INSIDE needs alpha > 0, not {self.alpha}")

    def value(self, evidence: Evidence) -> float:
        """The EigenScore of the samples that are not empty."""
        states = [sample.embedding for sample in with_tokens(evidence.samples(self.plan))]
        embeddings = [embedding for embedding in states if embedding is not None]
        if len(embeddings) < len(states):
            raise ScoringError("this architecture's layers are not known, so samples have no embedding")
        return eigen_score(np.array(embeddings), alpha=self.alpha)


def eigen_score(embeddings: NDArray[np.float64], *, alpha: float) -> float:
    """The mean log eigenvalue of the regularised covariance of K embeddings [K, d], d > 1."""
    covariance = np.atleast_2d(np.cov(embeddings))
    eigenvalues = np.linalg.eigvalsh(covariance + alpha * np.eye(len(embeddings)))
    # Rounding may leave an eigenvalue of a positive semi-definite matrix a little below zero.
    return float(np.log(np.maximum(eigenvalues, alpha)).mean())
