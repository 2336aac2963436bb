"""The scores of one response as plain numbers: finite, or absent with a reason.

Why: docs/adr/0087-no-score-rather-than-a-wrong-one.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

Tier = Literal["captured", "prefix", "full"]
"""The three ways of a replay, cheapest first (`replay.py`)."""

NO_GRADIENT = (
    "no gradient reaches the prompt's hidden states: t* is out of the reach of every layer's attention, or a layer "
    "lets no gradient through"
)
"""Why there is no score where the head has something to send back, and none of it arrives."""

Grid = tuple[tuple[float, ...], ...]
"""Layers x prompt tokens."""


@dataclass(frozen=True)
class GradientScores:
    """The scores of one response; all higher = less certain, >= 0. None, with a `reason`, where not finite.

    Nor is there a score where SemGrad is exactly zero and ParaGrad is not: then no gradient reached t*.

    `semgrad` is the mean absolute gradient at t* over the span (Eq. 4), `paragrad` that of the output head,
    `hybridgrad` their mixture with tau = beta = 1 (another norm or token where the objective has one). `entropies` and
    `log_probs` hold one value per response token (nats), `mean_entropy` their mean entropy, `greedy_nll` the
    response's negative log-likelihood (nats). `tier` tells how they were computed; every tier is exact.
    `paragrad_error` is the standard error of a ParaGrad that was sampled, None where it is exact. `deviation` is how
    far this tier was off from plain autograd in the model's self-check, relatively and in float32 (in float64 for such
    a model; 0 for "full", which is plain autograd); None where weights are broken.

    `grid[i][j]` is the mean absolute gradient at the span's i-th layer, ascending, and at the prompt's token j - n,
    n = len(grid[i]) (-1 is the prompt's last token). It covers the prompt from t* on, or its last tokens as the
    objective needs (all of them, where it has fewer), and is empty where a gradient is not finite. SemGrad of any
    layers at any of these tokens is the mean of its rows.
    """

    semgrad: float | None
    paragrad: float | None
    mean_entropy: float | None
    greedy_nll: float | None
    entropies: tuple[float, ...]
    log_probs: tuple[float, ...]
    tier: Tier
    reason: str | None = None
    grid: Grid = ()
    paragrad_error: float | None = None
    deviation: float | None = field(default=None, compare=False)

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


def unscored(tier: Tier, reason: str) -> GradientScores:
    """The record of a response of which nothing could be computed."""
    return GradientScores(None, None, None, None, (), (), tier, reason)


def assemble(
    lengths: Sequence[int],
    tier: Tier,
    *,
    semgrad: Sequence[float],
    grids: Sequence[Grid],
    paragrad: Sequence[float],
    entropies: torch.Tensor,
    log_probs: torch.Tensor,
    paragrad_errors: Sequence[float | None] | None = None,
) -> list[GradientScores]:
    """One record per response, or part of one: `semgrad`, `grids`, `paragrad` and `paragrad_errors` (None: all exact)
    have one entry each, the tensors [n] one per token, part after part."""
    errors = [None] * len(lengths) if paragrad_errors is None else paragrad_errors
    by_token = zip(
        *([t.double().tolist() for t in series.split(list(lengths))] for series in (entropies, log_probs)), strict=True
    )
    by_part = zip(semgrad, grids, zip(paragrad, errors, strict=True), by_token, strict=True)
    return [_finite(*part, tier=tier) for part in by_part]


def _finite(
    semgrad: float, grid: Grid, sampled: tuple[float, float | None], tokens: tuple[list[float], list[float]], tier: Tier
) -> GradientScores:
    (paragrad, error), (entropies, log_probs) = sampled, tokens
    if not all(map(math.isfinite, (*entropies, *log_probs))):
        return unscored(tier, "the model's logits are not finite")
    mean, nll = math.fsum(entropies) / len(entropies), -math.fsum(log_probs)
    facts = (mean, nll, tuple(entropies), tuple(log_probs), tier)
    if not (math.isfinite(semgrad) and math.isfinite(paragrad)):
        return GradientScores(None, None, *facts, "a gradient overflowed in the model's dtype")
    if semgrad == 0 and paragrad > 0:
        return GradientScores(None, None, *facts, NO_GRADIENT)
    finite = all(map(math.isfinite, chain.from_iterable(grid)))
    return GradientScores(semgrad, paragrad, *facts, grid=grid if finite else (), paragrad_error=error)


def deviation(scores: GradientScores, expected: GradientScores) -> float:
    """By how much SemGrad or ParaGrad differs, relative to the greater of both; infinite where one of them is none.

    The entries of a layer's row of the grid count as well, relative to its greatest.
    """
    pairs = ((scores.semgrad, expected.semgrad), (scores.paragrad, expected.paragrad))
    rows = (
        zip(scores.grid, expected.grid, strict=True)
        if len(scores.grid) == len(expected.grid)
        else [((0.0,), (math.inf,))]
    )
    off = [math.inf if a is None or b is None else _relative((a,), (b,)) for a, b in pairs]
    return max(*off, *(_relative(ours, theirs) for ours, theirs in rows))


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The greatest difference, relative to the greatest entry."""
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return difference / max(map(abs, (*ours, *theirs))) if difference else 0.0
