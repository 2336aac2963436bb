"""From a replay to scores: the head's share, and backward passes to the hidden states of the prompt.

Scores are plain numbers: finite, or absent with a reason. A tier is a way of replaying (`replayer.py`), which begins at
t* or with the first token. Every part of a response (`TokenBatch.segments`) is an objective of its own: its tokens
alone make up the sum, earlier ones are its context. All parts share the replay and its graph. One backward pass serves
one part of every row.

Why: docs/adr/0087-no-score-rather-than-a-wrong-one.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import LogitTransform, Norm, Objective
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.replay.captured_states import CapturedStates, Replayed
from semgrad_guard.engine.replay.hooks import by_token
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.head import score_head
from semgrad_guard.errors import UnsupportedModelError

Tier = Literal["captured", "prefix", "full"]
"""The three ways of a replay, cheapest first (`replayer.py`)."""

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
    `deviation` is how
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
) -> list[GradientScores]:
    """One record per response, or part of one: `semgrad`, `grids` and `paragrad` have one entry each, the tensors [n]
    one per token, part after part."""
    by_token = zip(
        *([t.double().tolist() for t in series.split(list(lengths))] for series in (entropies, log_probs)), strict=True
    )
    by_part = zip(semgrad, grids, paragrad, by_token, strict=True)
    return [_finite(*part, tier=tier) for part in by_part]


def _finite(
    semgrad: float, grid: Grid, paragrad: float, tokens: tuple[list[float], list[float]], tier: Tier
) -> GradientScores:
    entropies, log_probs = tokens
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


# How far two exact computations may differ in each dtype: kernels of other shapes round differently, and scores of
# nearly certain answers carry that noise (bfloat16: up to 15 % at a mean entropy of 0.3).
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.05}


def tolerance_of(dtype: torch.dtype) -> float:
    """By how much two exact computations may differ in a dtype, relatively; a quarter in bfloat16, or any other one."""
    return _TOLERANCE.get(dtype, 0.25)


@dataclass(frozen=True)
class Exactness:
    """The result of a self-check.

    `tiers` are exact, cheapest first, "full" always the last; `deviations` is how far each was off, relative to plain
    autograd. `cuts`: states before t* can be kept apart as a cache. `pads`: rows of a batch may be padded on the left.
    `plain`: replays are exact only where they keep closer to the model's own code. `in_context` are the tiers that are
    exact for a response with context, None as long as that was not checked, and `merges` whether they are so in one
    pass. `transform` follows the head. `failure` is the reason why nothing could be compared (broken weights): then
    only "full" is left, the model's own call. `token_bytes` is the size of a token's keys and values, where answers can
    join a running batch.
    """

    tiers: tuple[Tier, ...] = ("full",)
    deviations: Mapping[Tier, float] = field(default_factory=lambda: {"full": 0.0})
    cuts: bool = False
    pads: bool = False
    plain: bool = False
    in_context: tuple[Tier, ...] | None = None
    merges: bool = False
    transform: LogitTransform = field(default_factory=LogitTransform)
    failure: str | None = None
    token_bytes: int = 0

    @property
    def rank(self) -> tuple[bool, ...]:
        """Which of two findings is better: more tiers, replays from t* on, padding."""
        return "captured" in self.tiers, self.cuts and "prefix" in self.tiers, self.pads, "prefix" in self.tiers


def score_by(
    tier: Tier,
    way: Exactness,
    *,
    replayer: Replayer,
    batch: TokenBatch,
    objective: Objective,
    span: Sequence[int],
    captured: States = None,
) -> Rows:
    """Score every part of every row in one tier ("captured" needs `captured`), in the way that is exact.

    Where states cannot be cut at t*, the rows are replayed one by one, from their first token on. Rows with context are
    replayed from the states of each (`ContextRows`), of one pass where there are none.
    """

    def from_states(batch: TokenBatch, replayed: Replayed) -> Rows:
        kept = replayer.memory.logits
        return through_head(
            batch, objective, replayed, tier, head=replayer.head, transform=way.transform, kept_bytes=kept
        )

    if batch.context and tier != "full":
        sources = captured if isinstance(captured, tuple) else () if captured is None else (captured,)
        known = sources or tuple(replayer.record(row, span[0]) for row in batch.rows())
        bypasses = "captured" in (way.in_context or ())
        return from_states(batch, replayer.in_context(batch, span, known, bypasses=bypasses, merges=way.merges))
    if tier == "captured" and isinstance(captured, CapturedStates):
        return from_states(batch, replayer.captured(batch, span, captured))
    if tier == "prefix" and way.cuts:
        return from_states(batch, replayer.prefix(batch, span))
    if tier == "prefix":
        return tuple(from_states(row, replayer.whole(row, span))[0] for row in batch.rows())
    return tuple(through_logits(row, objective, replayer.full(row, span)) for row in batch.rows())


Rows = tuple[tuple[GradientScores, ...], ...]
"""The scores of every part of every row."""

States = CapturedStates | tuple[CapturedStates, ...] | None
"""The states that are known of a batch; of rows with context, those of the text of each row."""


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
    )
    # A power of two per part keeps the seed away from float16's and bfloat16's ends; it is divided out exactly.
    scales = torch.stack([_scale_of(seed) for seed in result.seed.split(parts)])
    seed = result.seed * scales.repeat_interleave(torch.tensor(parts, device=scales.device))[:, None]
    semgrad, grids = [0.0] * len(parts), list[Grid]([()]) * len(parts)
    for members, chosen, is_last in _rounds(batch, seed):
        current_stop().check()
        gradients = _gradients(states, replayed, retain_graph=not is_last, grad_outputs=chosen.to(states.dtype))
        for row, part in members:
            at_token, grid = _reduce(batch, row, gradients, replayed.start, objective.norm)
            scale = float(scales[part])
            semgrad[part], grids[part] = at_token / scale, tuple(tuple(x / scale for x in layer) for layer in grid)
    tokens = {"entropies": result.entropies, "log_probs": result.log_probs}
    paragrad = result.paragrad.tolist()
    scores = assemble(parts, tier, semgrad=semgrad, grids=grids, paragrad=paragrad, **tokens)
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
        hidden = _gradients(loss, replayed, retain_graph=number < len(losses))
        at_token, grid = _reduce(batch, 0, hidden, replayed.start, objective.norm)
        semgrad.append(at_token)
        grids.append(grid)
    tokens = {"entropies": entropies, "log_probs": log_probs.detach()}
    return tuple(assemble(parts, "full", semgrad=semgrad, grids=grids, paragrad=paragrad, **tokens))


def _gradients(
    output: torch.Tensor, replayed: Replayed, *, retain_graph: bool, grad_outputs: Any = None
) -> list[torch.Tensor]:
    """The gradients by hidden states [B, columns, width].

    Raises:
        UnsupportedModelError: a state has no part in any gradient.
    """
    if not all(states.requires_grad for states in replayed.hidden):
        raise UnsupportedModelError(
            "this model runs some of its layers under torch.no_grad(), as its own code says: plain automatic "
            "differentiation has no gradient by their hidden states. Choose other layers, or another model."
        )
    found = torch.autograd.grad(
        output, list(replayed.hidden), grad_outputs=grad_outputs, retain_graph=retain_graph, allow_unused=True
    )
    gradients: list[torch.Tensor] = []
    for gradient in found:
        if gradient is None:
            raise UnsupportedModelError(
                "the hidden states that this model reports are copies, from which no path leads to its logits; there "
                "is nothing to differentiate by. Use a model whose layers pass on one state for each token."
            )
        gradients.append(by_token(gradient, replayed.token_axis))
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
    batch: TokenBatch, row: int, gradients: Sequence[torch.Tensor], start: int, norm: Norm
) -> tuple[float, Grid]:
    """One row's number at its token, and its grid, from the gradients [B, columns, d] of the span's layers."""
    token, first = batch.prompts.token_columns[row] - start, batch.prompts.grid_columns[row] - start
    end = first + batch.prompt_ends[row] - batch.grid_columns[row]
    at_token = torch.stack([gradient[row, token].double() for gradient in gradients])
    prompt = torch.stack([gradient[row, first:end] for gradient in gradients])
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
    ends = accumulate(map(len, batch.segments), initial=0)
    return tuple(tuple(scores[begin:end]) for begin, end in pairwise(ends))
