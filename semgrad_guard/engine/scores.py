"""The scores of one response as plain numbers: finite, or absent with a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Tier = Literal["captured", "prefix", "full"]
"""The three ways of a replay, cheapest first (`replay.py`)."""


@dataclass(frozen=True)
class GradientScores:
    """The scores of one response; all higher = less certain, >= 0. None, with a `reason`, where not finite.

    `semgrad` is the mean absolute gradient at t* over the span (Eq. 4), `paragrad` that of the output head,
    `hybridgrad` their mixture with tau = beta = 1. `entropies` and `log_probs` hold one value per response token
    (nats), `mean_entropy` their mean entropy, `greedy_nll` the response's negative log-likelihood (nats).
    `tier` tells how they were computed; every tier is exact.
    """

    semgrad: float | None
    paragrad: float | None
    mean_entropy: float | None
    greedy_nll: float | None
    entropies: tuple[float, ...]
    log_probs: tuple[float, ...]
    tier: Tier
    reason: str | None = None

    @property
    def hybridgrad(self) -> float | None:
        """(1 - a) SemGrad + a ParaGrad with a = exp(-mean entropy)."""
        return self.hybrid()

    def hybrid(self, *, tau: float = 1.0, beta: float = 1.0) -> float | None:
        """The appendix's form: (1 - a) SemGrad + beta a ParaGrad with a = exp(-mean entropy / tau)."""
        if self.semgrad is None or self.paragrad is None or self.mean_entropy is None:
            return None
        balance = math.exp(-self.mean_entropy / tau)
        return (1 - balance) * self.semgrad + beta * balance * self.paragrad


def assemble(
    lengths: Sequence[int],
    tier: Tier,
    *,
    semgrad: torch.Tensor,
    paragrad: torch.Tensor,
    entropies: torch.Tensor,
    log_probs: torch.Tensor,
) -> tuple[GradientScores, ...]:
    """One record per response from a batch's tensors: [B] for the gradients, all tokens in a row for the rest."""
    rows = zip(semgrad.tolist(), paragrad.tolist(), entropies.split(lengths), log_probs.split(lengths), strict=True)
    return tuple(_finite(s, p, w.double().tolist(), lp.double().tolist(), tier) for s, p, w, lp in rows)


def _finite(
    semgrad: float, paragrad: float, entropies: list[float], log_probs: list[float], tier: Tier
) -> GradientScores:
    if not all(map(math.isfinite, (*entropies, *log_probs))):
        return GradientScores(None, None, None, None, (), (), tier, "the model's logits are not finite")
    mean, nll = math.fsum(entropies) / len(entropies), -math.fsum(log_probs)
    facts = (mean, nll, tuple(entropies), tuple(log_probs), tier)
    if not (math.isfinite(semgrad) and math.isfinite(paragrad)):
        return GradientScores(None, None, *facts, "a gradient overflowed in the model's dtype")
    return GradientScores(semgrad, paragrad, *facts)


def agree(found: GradientScores, expected: GradientScores, tolerance: float) -> bool:
    """Whether both gradients exist and are equal within a relative tolerance."""
    pairs = ((found.semgrad, expected.semgrad), (found.paragrad, expected.paragrad))
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)
