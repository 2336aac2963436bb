"""The numbers of one response: scores, made of a replay, and what it shows without a gradient.

A score takes the head's share, and gradients by hidden states. Likelihoods and a middle layer's states are computed by
writing an answer: they are read off the tape that it leaves, or off one pass over a text from elsewhere. All are plain
numbers: finite, or absent with a reason.

Why: docs/decisions.md#0087
Why: docs/decisions.md#0107
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import LogitTransform, Norm, Objective
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.engine.replay.replay import continued, replay
from semgrad_guard.engine.replay.tape import Row, Tape
from semgrad_guard.engine.replay.twin import Twin
from semgrad_guard.engine.scores.head import Logits, score_head

Tier = Literal["replay", "ordinary"]
"""How a score was computed: by rows of live positions over constants, or by the model's own call and plain autograd."""

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
    response's negative log-likelihood (nats). `tier` tells how they were computed; both are exact. `deviation` is how
    far replays were off from plain autograd in the model's self-check, relatively and in float32 (in float64 for such
    a model; 0 for "ordinary", which is plain autograd); None where weights are broken.

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


def assembled(
    tier: Tier,
    *,
    semgrad: float,
    grid: Grid,
    paragrad: float,
    entropies: Sequence[float],
    log_probs: Sequence[float],
) -> GradientScores:
    """The record of one response: nothing that is not finite is delivered."""
    if not all(map(math.isfinite, (*entropies, *log_probs))):
        return unscored(tier, "the model's logits are not finite")
    mean, nll = math.fsum(entropies) / len(entropies), -math.fsum(log_probs)
    facts = (mean, nll, tuple(entropies), tuple(log_probs), tier)
    if not (math.isfinite(semgrad) and math.isfinite(paragrad)):
        return GradientScores(None, None, *facts, "a gradient overflowed in the model's dtype")
    if semgrad == 0 and paragrad > 0:
        return GradientScores(None, None, *facts, NO_GRADIENT)
    finite = all(map(math.isfinite, chain.from_iterable(grid)))
    return GradientScores(semgrad, paragrad, *facts, grid=grid if finite else ())


def replayed(
    twin: Twin,
    rows: Sequence[Row],
    objective: Objective,
    *,
    transform: LogitTransform,
    memory: Memory,
    token_axis: int | None = None,
    fits: bool = True,
) -> list[GradientScores]:
    """The scores of rows on tape by one replay and one backward pass; with a `token_axis`, of one row by continuation.

    A power of two per row keeps the seed of the backward pass away from float16's and bfloat16's ends; it is divided
    out exactly.
    """
    span, lengths = objective.span(twin.architecture.n_layers), [row.length for row in rows]
    graph = replay(twin, rows, span, fits=fits) if token_axis is None else continued(twin, rows[0], span)
    with graph as (predicting, hidden):
        current_stop().check()
        targets = torch.tensor([token for row in rows for token in row.targets], device=predicting.device)
        head = score_head(
            predicting.detach(),
            targets,
            lengths=lengths,
            head=twin.head,
            transform=transform,
            objective=objective,
            raw_logits=_kept_logits(rows),
            kept_bytes=memory.logits,
        )
        scales = torch.stack([_scale_of(seed) for seed in head.seed.split(lengths)])
        factors = scales.repeat_interleave(torch.tensor(lengths, device=scales.device))[:, None]
        gradients = torch.autograd.grad(predicting, hidden, grad_outputs=(head.seed * factors).to(predicting.dtype))
    if token_axis is not None:
        gradients = [by_token(gradient, token_axis) for gradient in gradients]
    entropies, log_probs = (series.double().split(lengths) for series in (head.entropies, head.log_probs))
    found: list[GradientScores] = []
    for place, (row, scale) in enumerate(zip(rows, scales.tolist(), strict=True)):
        semgrad, grid = reduced(row, [gradient[place] for gradient in gradients], row.first, objective.norm)
        found.append(
            assembled(
                "replay",
                semgrad=semgrad / scale,
                grid=tuple(tuple(entry / scale for entry in layer) for layer in grid),
                paragrad=float(head.paragrad[place]),
                entropies=entropies[place].tolist(),
                log_probs=log_probs[place].tolist(),
            )
        )
    return found


def _kept_logits(rows: Sequence[Row]) -> list[torch.Tensor] | None:
    known = [row.tape and row.tape.steps("logits", row.begin - 1, row.end - 1) for row in rows]
    return [step for steps in known if steps for step in steps] if all(known) else None


def _scale_of(seed: torch.Tensor) -> torch.Tensor:
    peak = seed.abs().max()
    usable = torch.isfinite(peak) & (peak > 0)
    return torch.where(usable, torch.exp2(-torch.floor(torch.log2(peak))), torch.ones_like(peak))


@dataclass(frozen=True)
class Observation:
    """One answer as its model sees it.

    `log_probs` and `entropies` hold one value per response token, in nats. `state` is the mean of h^(k) [d] over the
    positions that predict the response tokens, or of the tokens' own (`own`), k = `observed_layer(L)`; empty where the
    model's layers are not known. Where a number is not finite there is nothing but the `reason`.
    """

    log_probs: tuple[float, ...]
    entropies: tuple[float, ...]
    state: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def greedy_nll(self) -> float | None:
        """The response's negative log-likelihood in nats, >= 0."""
        return -math.fsum(self.log_probs) if self.log_probs else None

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the tokens' entropies in nats, >= 0."""
        return math.fsum(self.entropies) / len(self.entropies) if self.entropies else None


def observed_layer(n_layers: int) -> int:
    """The layer whose states are averaged: the first of the paper's span, which writing keeps anyway."""
    return min(n_layers // 2 + 1, n_layers - 1)


@torch.no_grad()
def observe(twin: Twin, row: Row, transform: LogitTransform, *, own: bool = False) -> Observation:
    """One row, whose tape holds the states before the head and h^(k) at its positions (`can_be_observed`)."""
    tape, begin, end = row.taped, row.begin - 1, row.end - 1
    finals = torch.stack(tape.steps("finals", begin, end) or [])
    targets = torch.tensor(row.targets, device=finals.device)
    logits = Logits(finals, targets, twin.head, transform=transform, raw=tape.steps("logits", begin, end))
    distribution, aims = logits.survey()
    state = tape.hidden([(begin + own, end + own)]).double().mean(0)
    series = [distribution.log_probs(aims).double(), distribution.entropies.double(), state]
    if not all(bool(numbers.isfinite().all()) for numbers in series):
        return Observation((), (), reason="the model's logits or hidden states are not finite")
    log_probs, entropies, mean = (tuple(numbers.tolist()) for numbers in series)
    return Observation(log_probs, entropies, mean)


def can_be_observed(row: Row, tape: Tape, layer: int, *, own: bool = False) -> bool:
    """Whether a tape has all that `observe` reads; a limit cuts an answer off before its last token is read."""
    if tape.layer != layer or tape.begin > row.begin - 1 or tape.end < row.end - 1 + own:
        return False
    return tape.steps("finals", row.begin - 1, row.end - 1) is not None


def reduced(row: Row, gradients: Sequence[torch.Tensor], start: int, norm: Norm) -> tuple[float, Grid]:
    """One row's number at its token, and its grid, from the gradients [positions, d] of the span's layers."""
    at_token = torch.stack([gradient[row.token - start].double() for gradient in gradients])
    prompt = torch.stack([gradient[row.grid - start : row.prompt - start] for gradient in gradients])
    return norm_of(at_token, norm), tuple(map(tuple, prompt.double().abs().mean(-1).tolist()))


def norm_of(gradient: torch.Tensor, norm: Norm) -> float:
    """Mean absolute value (l1), or root mean square (l2)."""
    return float(gradient.abs().mean() if norm == "l1" else gradient.square().mean().sqrt())


def by_token(states: torch.Tensor, token_axis: int) -> torch.Tensor:
    """States or their gradients as [B, tokens, width], all residual streams of a token side by side."""
    if states.ndim == 3:
        return states if token_axis == 1 else states.transpose(0, 1)
    return states.movedim((token_axis - 1, token_axis), (0, 1)).flatten(2)


def deviation(scores: GradientScores, expected: GradientScores) -> float:
    """By how much SemGrad or ParaGrad differs, relative to the greater of both; infinite where one of them is none.

    The entries of a layer's row of the grid count as well, relative to its greatest.
    """
    if len(scores.grid) != len(expected.grid):
        return math.inf
    pairs = ((scores.semgrad, expected.semgrad), (scores.paragrad, expected.paragrad))
    off = [math.inf if a is None or b is None else _relative((a,), (b,)) for a, b in pairs]
    return max(*off, *(_relative(ours, theirs) for ours, theirs in zip(scores.grid, expected.grid, strict=True)))


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The greatest difference, relative to the greatest entry."""
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return difference / max(map(abs, (*ours, *theirs))) if difference else 0.0


# How far two exact computations may differ in each dtype: kernels of other shapes round differently, and scores of
# nearly certain answers carry that noise (bfloat16: up to 15 % at a mean entropy of 0.3). Code of many models takes
# norms, softmax or states in float32, whatever their dtype is (float64: 9e-7 at most, over every architecture).
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05}


def tolerance_of(dtype: torch.dtype) -> float:
    """By how much two exact computations may differ in a dtype, relatively; a quarter in bfloat16, or any other one."""
    return _TOLERANCE.get(dtype, 0.25)
