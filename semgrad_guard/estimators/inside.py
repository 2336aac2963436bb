"""INSIDE: the EigenScore of the samples' embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.errors import InputError, ScoringError
from semgrad_guard.estimators.sampled import AskingEstimator, with_tokens

_PLAN = Sampling(count=10, temperature=0.5, top_p=0.99, top_k=5)


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

    plan: Sampling = _PLAN
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
