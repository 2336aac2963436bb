"""RAUQ: token probabilities, carried from token to token by the heads that attend to the token before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from semgrad_guard.errors import InputError
from semgrad_guard.estimators.base import AttendingEstimator


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
