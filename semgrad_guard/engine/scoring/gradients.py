"""From a replay to scores: the head's share, and backward passes to the hidden states of the prompt.

Every part of a response (`TokenBatch.segments`) is an objective of its own: its tokens alone make up the sum, earlier
ones are its context. All parts share the replay and its graph. One backward pass serves one part of every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.models.architecture import LogitTransform
from semgrad_guard.engine.objective import Norm, Objective
from semgrad_guard.engine.replay.input_hooks import by_token
from semgrad_guard.engine.replay.replayer import Replayed
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.scoring.head import score_head
from semgrad_guard.engine.scoring.scores import GradientScores, Grid, Tier, assemble
from semgrad_guard.errors import UnsupportedModelError

Rows = tuple[tuple[GradientScores, ...], ...]
"""The scores of every part of every row."""


def through_head(
    batch: TokenBatch,
    objective: Objective,
    replayed: Replayed,
    tier: Tier,
    *,
    head: nn.Linear,
    transform: LogitTransform,
    kept_bytes: int,
) -> Rows:
    """Scores of a replay that stopped before the head."""
    if replayed.final is None:
        raise RuntimeError("a replay without the head keeps its input")
    states = batch.predicting(replayed.final, replayed.head_start)
    parts = batch.parts
    result = score_head(
        states.detach(),
        batch.targets(),
        lengths=parts,
        head=head,
        transform=transform,
        averages=objective.averages,
        weighted=objective.weighted,
        norm=objective.norm,
        raw_logits=replayed.kept_logits,
        kept_bytes=kept_bytes,
        sampled_rows=objective.sampled_rows,
    )
    # A power of two per part keeps the seed away from float16's and bfloat16's ends; it is divided out exactly.
    scales = torch.stack([_scale_of(seed) for seed in result.seed.split(parts)])
    seed = result.seed * scales.repeat_interleave(torch.tensor(parts, device=scales.device))[:, None]
    semgrad, grids = [0.0] * len(parts), list[Grid]([()]) * len(parts)
    for members, chosen, is_last in _rounds(batch, seed):
        current_stop().check()
        gradients = _gradients(
            states,
            replayed.hidden,
            grad_outputs=chosen.to(states.dtype),
            retain_graph=not is_last,
            axis=replayed.token_axis,
        )
        for row, part in members:
            at_token, grid = _reduce(batch, row, gradients, start=replayed.start, norm=objective.norm)
            scale = float(scales[part])
            semgrad[part], grids[part] = at_token / scale, tuple(tuple(x / scale for x in layer) for layer in grid)
    tokens = {"entropies": result.entropies, "log_probs": result.log_probs}
    paragrad, errors = result.paragrad.tolist(), result.paragrad_errors
    scores = assemble(parts, tier, semgrad=semgrad, grids=grids, paragrad=paragrad, paragrad_errors=errors, **tokens)
    return _by_row(batch, scores)


def no_gradient() -> UnsupportedModelError:
    """The error for a model whose layers let no gradient through."""
    return UnsupportedModelError(
        "no gradient reaches this model's hidden states: layers that quantize their activations (torchao's dynamic "
        "ones, for example) stop it. Load the model unquantized, or with its weights quantized alone."
    )


def through_logits(batch: TokenBatch, objective: Objective, replayed: Replayed) -> tuple[GradientScores, ...]:
    """The full tier, for one row: autograd from the model's own logits to the head's weight and the span."""
    if replayed.logits is None or replayed.head_weight is None:
        raise RuntimeError("a full replay keeps its logits")
    (parts,) = batch.segments
    with torch.enable_grad():
        logits = batch.predicting(replayed.logits, replayed.head_start).double()
        log_p = torch.log_softmax(logits, dim=-1)
        entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        log_probs = log_p.gather(1, batch.targets()[:, None]).squeeze(1)
        terms = (entropies if objective.weighted else 1.0) * log_probs
        if not terms.requires_grad:
            raise no_gradient()
        losses = [part.mean() if objective.averages else part.sum() for part in terms.split(parts)]
    semgrad: list[float] = []
    grids: list[Grid] = []
    paragrad: list[float] = []
    for number, loss in enumerate(losses, start=1):
        current_stop().check()
        (by_head,) = torch.autograd.grad(loss, [replayed.head_weight], retain_graph=True)
        paragrad.append(_norm_of(by_head.double(), objective.norm))
        more = number < len(losses)
        hidden = _gradients(loss, replayed.hidden, retain_graph=more, axis=replayed.token_axis)
        at_token, grid = _reduce(batch, 0, hidden, start=replayed.start, norm=objective.norm)
        semgrad.append(at_token)
        grids.append(grid)
    tokens = {"entropies": entropies, "log_probs": log_probs.detach()}
    return tuple(
        assemble(parts, "full", semgrad=semgrad, grids=grids, paragrad=paragrad, paragrad_errors=None, **tokens)
    )


def _gradients(
    output: torch.Tensor, hidden: Sequence[torch.Tensor], *, axis: int, retain_graph: bool, grad_outputs: Any = None
) -> list[torch.Tensor]:
    """The gradients by hidden states [B, columns, width].

    Raises:
        UnsupportedModelError: a state has no part in any gradient.
    """
    if not all(states.requires_grad for states in hidden):
        raise UnsupportedModelError(
            "this model runs some of its layers under torch.no_grad(), as its own code says: plain automatic "
            "differentiation has no gradient by their hidden states. Choose other layers, or another model."
        )
    found = torch.autograd.grad(
        output, list(hidden), grad_outputs=grad_outputs, retain_graph=retain_graph, allow_unused=True
    )
    gradients: list[torch.Tensor] = []
    for gradient in found:
        if gradient is None:
            raise UnsupportedModelError(
                "the hidden states that this model reports are copies, from which no path leads to its logits; there "
                "is nothing to differentiate by. Use a model whose layers pass on one state for each token."
            )
        gradients.append(by_token(gradient, axis))
    return gradients


def _rounds(batch: TokenBatch, seed: torch.Tensor) -> Iterator[tuple[list[tuple[int, int]], torch.Tensor, bool]]:
    """Round r takes the r-th part of every row that has one: ((row, part), ...), the seed of their tokens, the end."""
    count = max(map(len, batch.segments))
    order = [r for row in batch.segments for r in range(len(row))]
    rows = [number for number, row in enumerate(batch.segments) for _ in row]
    round_of = torch.tensor(order, device=seed.device).repeat_interleave(torch.tensor(batch.parts, device=seed.device))
    for number in range(count):
        members = [(rows[part], part) for part, r in enumerate(order) if r == number]
        yield members, seed.where((round_of == number)[:, None], 0.0), number == count - 1


def _reduce(
    batch: TokenBatch, row: int, gradients: Sequence[torch.Tensor], *, start: int, norm: Norm
) -> tuple[float, Grid]:
    """One row's number at its token, and its grid, from the gradients [B, columns, d] of the span's layers."""
    first = batch.grid_columns[row]
    at_token = torch.stack([gradient[row, batch.token_columns[row] - start].double() for gradient in gradients])
    prompt = torch.stack([gradient[row, first - start : batch.prompt_columns - start] for gradient in gradients])
    grid = prompt.double().abs().mean(-1)
    return _norm_of(at_token, norm), tuple(map(tuple, grid.tolist()))


def _norm_of(gradient: torch.Tensor, norm: Norm) -> float:
    """Mean absolute value (l1), or root mean square (l2)."""
    return float(gradient.abs().mean() if norm == "l1" else gradient.square().mean().sqrt())


def _scale_of(seed: torch.Tensor) -> torch.Tensor:
    peak = seed.abs().max()
    usable = torch.isfinite(peak) & (peak > 0)
    return torch.where(usable, torch.exp2(-torch.floor(torch.log2(peak))), torch.ones_like(peak))


def _by_row(batch: TokenBatch, scores: Sequence[GradientScores]) -> Rows:
    ends = [0]
    for row in batch.segments:
        ends.append(ends[-1] + len(row))
    return tuple(tuple(scores[begin:end]) for begin, end in pairwise(ends))
