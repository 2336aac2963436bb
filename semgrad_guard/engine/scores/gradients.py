"""The numbers of one response: scores, by a replay or by the ordinary call, and what it shows without a gradient.

A score takes the head's share, and gradients by hidden states. The ordinary call defines it: a row's tokens alone,
through the model's own code, and plain autograd. Likelihoods and a middle layer's states are computed by
writing an answer: they are read off the tape that it leaves, or off one pass over a text from elsewhere. All are plain
numbers: finite, or absent with a reason.

Why: docs/decisions.md#0087
Why: docs/decisions.md#0107
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch
from transformers.cache_utils import DynamicCache

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import LogitTransform, Norm, Objective
from semgrad_guard.engine.scores.head import Logits, score_head
from semgrad_guard.engine.scores.replay import FixedLayer, continued, replay
from semgrad_guard.engine.scores.tape import Memory, Row, Tape
from semgrad_guard.engine.scores.twin import CACHE, Twin
from semgrad_guard.errors import UnsupportedModelError

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
    steps = [row.tape and row.tape.steps("logits", row.begin - 1, row.end - 1) for row in rows]
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
            raw_logits=[step for own in steps if own for step in own] if all(steps) else None,
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


def _scale_of(seed: torch.Tensor) -> torch.Tensor:
    peak = seed.abs().max()
    usable = torch.isfinite(peak) & (peak > 0)
    return torch.where(usable, torch.exp2(-torch.floor(torch.log2(peak))), torch.ones_like(peak))


# By the ordinary call.


class Ordinary:
    """One row by the model's ordinary call. Its graph lives as long as this object.

    `raw` is the head's own output and `logits` the model's, [columns, V], where the head's module was called;
    `token_axis` is the axis of hidden states that counts tokens.

    Raises:
        UnsupportedModelError: the model's own call cannot be differentiated by the states of its layers.
    """

    def __init__(self, twin: Twin, row: Row, span: Sequence[int]) -> None:
        raw: list[torch.Tensor] = []
        embedding: Any = twin.model.get_input_embeddings()
        scored = slice(-(row.length + 1), -1)  # the last token predicts nothing, but has a place in the sequence
        with ExitStack() as stack:
            # A copy of the tensor with a gradient: some models scale it in place.
            began = embedding.register_forward_hook(lambda *call: call[2].detach().requires_grad_().clone())
            stack.callback(began.remove)
            stack.callback(twin.head.register_forward_hook(lambda *call: raw.append(call[2].detach())).remove)
            self._weight = stack.enter_context(twin.with_a_head_weight_of_its_own())
            stack.enter_context(torch.enable_grad())
            options: dict[str, Any] = {"logits_to_keep": row.length + 1}
            if row.in_context:
                # A cache through which the keys and values of the context let no gradient pass.
                places, cache = torch.arange(row.end, device=twin.device), cast(Any, DynamicCache())
                still = ((places >= row.prompt) & (places < row.begin))[None]
                cache.layer_class_to_replicate = partial(FixedLayer, still=still)
                options |= {"use_cache": True, CACHE: cache}
            output, self._hidden, self.token_axis = _called(twin, row.ids[: row.end], span, **options)
        self._row, self.logits = row, output.logits[0, scored]
        self.raw = raw[-1][0, scored] if raw else None

    def scores(self, objective: Objective) -> GradientScores:
        """By autograd from the model's own logits to the head's weight and the span."""
        with torch.enable_grad():
            log_p = torch.log_softmax(self.logits.double(), dim=-1)
            entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
            targets = torch.tensor(self._row.targets, device=log_p.device)
            log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
            terms = (entropies if objective.weighted else 1.0) * log_probs
            if not terms.requires_grad:
                raise no_gradient()
            loss = terms.mean() if objective.averages else terms.sum()
        by_head, *hidden = self._gradients(loss)
        semgrad, grid = reduced(self._row, hidden, 0, objective.norm)
        return assembled(
            "ordinary",
            semgrad=semgrad,
            grid=grid,
            paragrad=norm_of(by_head.double(), objective.norm),
            entropies=entropies.tolist(),
            log_probs=log_probs.tolist(),
        )

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """By the head's weight, and by the hidden states [columns, width] of each layer."""
        if not all(states.requires_grad for states in self._hidden):
            raise UnsupportedModelError(
                "this model runs some of its layers under torch.no_grad(), as its own code says: plain automatic "
                "differentiation has no gradient by their hidden states. Choose other layers, or another model."
            )
        by_head, *found = torch.autograd.grad(loss, [self._weight, *self._hidden], allow_unused=True)
        if by_head is None or any(gradient is None for gradient in found):
            raise UnsupportedModelError(
                "the hidden states that this model reports are copies, from which no path leads to its logits; there "
                "is nothing to differentiate by. Use a model whose layers pass on one state for each token."
            )
        return [by_head, *(by_token(gradient, self.token_axis)[0] for gradient in found)]


def hidden_states(twin: Twin, ids: Sequence[int]) -> torch.Tensor:
    """h^(l) of a text for l = 0 .. L-1, without a graph: [L, tokens, width].

    Raises:
        UnsupportedModelError: which recorded state belongs to which layer or token is not known.
    """
    with torch.no_grad():
        _, hidden, axis = _called(twin, ids, range(twin.architecture.n_layers), logits_to_keep=1)
    return torch.stack([by_token(states, axis)[0] for states in hidden])


def no_gradient() -> UnsupportedModelError:
    """The error for a model whose layers let no gradient through."""
    return UnsupportedModelError(
        "no gradient reaches this model's hidden states: layers that quantize their activations (torchao's dynamic "
        "ones, for example) stop it. Load the model unquantized, or with its weights quantized alone."
    )


def _called(
    twin: Twin, ids: Sequence[int], span: Sequence[int], **options: Any
) -> tuple[Any, Sequence[torch.Tensor], int]:
    """The model's own output for a text; h^(l) of a span, as decoder layers received them; the axis that counts tokens.

    The states are verified by the model's own record of them. Where that holds other tensors, it is taken instead, if
    it has one for each layer. (Some models, Mamba for one, record the layers' outputs without the embedding: their
    numbering is off by one.)

    Raises:
        UnsupportedModelError: which state belongs to which layer or token is not known.
    """
    n_layers, seen = twin.architecture.n_layers, list[tuple[int, torch.Tensor]]()
    watched = {*span, n_layers - 1} if twin.layers else set[int]()

    def keep(layer: int, states: torch.Tensor) -> None:
        seen.append((layer, states))

    twin.reset()
    with twin.watching({layer: partial(keep, layer) for layer in watched}):
        output = twin.call(torch.tensor([list(ids)], device=twin.device), output_hidden_states=True, **options)
    states, record = dict(seen), output.hidden_states or ()
    if len(seen) > len(states):
        raise UnsupportedModelError(
            "this model runs its decoder layers several times over, so that a layer has no single hidden state to "
            "differentiate by. Use a model that runs each layer once."
        )
    beyond_embedding = [own for layer, own in seen if layer]
    if not beyond_embedding or not all(_is_shown(own, record) for own in beyond_embedding):
        states = dict(enumerate(record))
        if len(record) != n_layers + 1:
            raise UnsupportedModelError(
                f"{type(twin.model).__name__} reports {len(record)} hidden states for its {n_layers} decoder layers; "
                "which one belongs to which layer is not known. Use a model that runs every layer of its stack on text."
            )
    hidden = [states[layer] for layer in span]
    axes = {_token_axis(own, len(ids)) for own in hidden}
    axis = axes.pop()
    if axes or axis is None:
        raise UnsupportedModelError(
            f"{type(twin.model).__name__} has hidden states of shape {tuple(hidden[0].shape)} for {len(ids)} tokens; "
            "which of them belong to which token is not known. Use a model whose layers pass on one state for each "
            "token."
        )
    return output, hidden, axis


def _is_shown(states: torch.Tensor, record: Sequence[torch.Tensor]) -> bool:
    """Whether a record of hidden states holds these, or a copy with batch and tokens exchanged."""
    if any(states is other for other in record):
        return True
    turned = states.transpose(0, 1)
    return any(turned.shape == other.shape != states.shape and torch.equal(turned, other) for other in record)


def _token_axis(states: torch.Tensor, columns: int) -> int | None:
    """The axis that counts tokens; None where several could, or none.

    Usually states are [B, tokens, d], seldom [tokens, B, d]. A model with several residual streams has
    [B, tokens, streams, d] or [streams, B, tokens, d].
    """
    if states.ndim == 3:
        return next((axis for axis in (1, 0) if states.shape[axis] == columns), None)
    axes = [axis for axis in (1, 2) if states.shape[axis - 1] != columns and states.shape[axis] == columns]
    return axes[0] if states.ndim == 4 and len(axes) == 1 else None


# Without a gradient.


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


# Common to both, and how far they may differ.


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
