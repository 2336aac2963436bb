"""The evidence of an answer's own tokens without a gradient: likelihoods, a middle layer's place of it, and attention.

Generating computes the first two. They are read off the states that a generation has left, or one pass over prompt and
answer. How the tokens attend to each other in the model's middle layers takes one pass, without a graph.

Why: docs/adr/0107-observing-without-a-replay.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from semgrad_guard.engine.interruption import add_cost
from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.replay.attention_weights import Neighbours, middle_layers
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.hooks import by_token
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring.head import Logits, score_head

_RIDGE = 1e-3  # LLM-Check's


@dataclass(frozen=True)
class Observation:
    """One answer as its model sees it.

    `log_probs` and `entropies` hold one value per response token, in nats. `state` is the mean of h^(k) [d] over the
    positions that predict the response tokens, or of the tokens' own (`own`), k = `observed_layer(L)`, with a model's
    several residual streams side by side; empty where the model's layers are not known. `spread` is
    1/T ln det(Z' J Z + .001 I) of the states that predict them, Z [d, T], each centred by J over its d entries; None
    without them. Where a number is not finite there is nothing but the `reason`.
    """

    log_probs: tuple[float, ...]
    entropies: tuple[float, ...]
    state: tuple[float, ...] = ()
    reason: str | None = None
    spread: float | None = None

    @property
    def greedy_nll(self) -> float | None:
        """The response's negative log-likelihood in nats, >= 0."""
        return -math.fsum(self.log_probs) if self.log_probs else None

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the tokens' entropies in nats, >= 0."""
        return math.fsum(self.entropies) / len(self.entropies) if self.entropies else None


@dataclass(frozen=True)
class HeadGradient:
    """ParaGrad of one answer, >= 0, for which no layer is differentiated; `error` is its standard error if sampled.

    None where it is not finite, with the `reason`.
    """

    paragrad: float | None
    error: float | None = None
    reason: str | None = None


def observed_layer(n_layers: int) -> int:
    """The layer whose states are averaged: the first of the paper's span, which generations keep anyway."""
    return min(n_layers // 2 + 1, n_layers - 1)


@torch.no_grad()
def observe(
    batch: TokenBatch,
    replayer: Replayer,
    n_layers: int,
    transform: LogitTransform,
    captured: CapturedStates | None = None,
    *,
    own: bool = False,
) -> tuple[Observation, ...]:
    """Observe every part of every row of a batch; `captured` is left by its generation and spares the pass.

    `transform` follows the model's head. `own`: the tokens' own states are averaged. An answer that a limit cut off has
    left none of its last token, and then it takes the pass.
    """
    if own and captured is not None and not captured.holds_answers(batch):
        captured = None
    states, start, final, raw = _seen(batch, replayer, n_layers, captured, whole=own)
    predicting = batch.predicting(states, start)
    averaged = batch.answering(states, start) if own else predicting
    surveys = None if raw is not None or captured is None else captured.surveyed(batch)
    logits = Logits(final, batch.targets(), replayer.head, transform=transform, raw=raw)
    if captured is not None and surveys is not None:
        add_cost(captured.survey_ms)
    distribution, aims = logits.survey() if surveys is None else logits.surveyed(surveys)
    parts = zip(
        distribution.log_probs(aims).double().split(batch.parts),
        distribution.entropies.double().split(batch.parts),
        (states.mean(0) for states in averaged.double().split(batch.parts)),
        predicting.double().split(batch.parts),
        strict=True,
    )
    found: list[Observation] = []
    for log_probs, entropies, state, predicted_from in parts:
        if all(bool(series.isfinite().all()) for series in (log_probs, entropies, state)):
            numbers, uncertainties, means = (tuple(series.tolist()) for series in (log_probs, entropies, state))
            found.append(Observation(numbers, uncertainties, means, spread=_spread(predicted_from)))
        else:
            found.append(Observation((), (), reason="the model's logits or hidden states are not finite"))
    return tuple(found)


@torch.no_grad()
def head_gradients(
    batch: TokenBatch,
    replayer: Replayer,
    n_layers: int,
    transform: LogitTransform,
    captured: CapturedStates | None = None,
    *,
    objective: Objective,
) -> tuple[HeadGradient, ...]:
    """ParaGrad of every part of every row, from the states before the head alone; arguments as in `observe`."""
    _, _, final, raw = _seen(batch, replayer, n_layers, captured)
    found = score_head(
        final,
        batch.targets(),
        lengths=batch.parts,
        head=replayer.head,
        transform=transform,
        averages=objective.averages,
        weighted=objective.weighted,
        norm=objective.norm,
        raw_logits=raw,
        kept_bytes=replayer.memory.logits,
        sampled_rows=objective.sampled_rows,
        backward=False,
    )
    return tuple(
        HeadGradient(value, error) if math.isfinite(value) else HeadGradient(None, reason="the gradient is not finite")
        for value, error in zip(found.paragrad.tolist(), found.paragrad_errors, strict=True)
    )


def _seen(
    batch: TokenBatch, replayer: Replayer, n_layers: int, captured: CapturedStates | None, *, whole: bool = False
) -> tuple[torch.Tensor, int, torch.Tensor, list[torch.Tensor] | None]:
    """h^(k) [B, columns, d] and its first column; for each response token the state before the head that predicted it
    [n, d], and the head's output. `whole`: h^(k) up to the last tokens."""
    layer = observed_layer(n_layers)
    final = None if captured is None or captured.layer != layer else captured.final_states(batch)
    if captured is not None and final is not None:
        return by_token(captured.states_of(batch, whole=whole), 1), batch.cut, final, captured.raw_logits(batch)
    start, hidden, final = replayer.observed(batch, layer, whole=whole)
    return hidden, start, batch.predicting(final, start), None


def _spread(states: torch.Tensor) -> float:
    """1/T ln det of the products of the centred states [T, d], with .001 on the diagonal."""
    centred = states - states.mean(1, keepdim=True)
    products = centred @ centred.T
    products.diagonal().add_(_RIDGE)
    return float(torch.linalg.slogdet(products).logabsdet) / len(states)


UNREADABLE = "the attention of this model's middle layers cannot be read, so there is no score by it"
NOT_FINITE = "the model's attention weights are not finite"


@dataclass(frozen=True)
class AttentionReading:
    """Attention weights of one answer of T tokens, in [0, 1], by layer of the middle third.

    `previous` [layers, T - 1]: the attention of each token from the second on to the one before it, in the layer's
    head that gives it most over the answer; empty rows for one token. `own` [layers]: the mean over heads of the mean
    logarithm of the attention of each token to itself (nats, <= 0). Where something is not known, only `reason` is set.
    """

    previous: tuple[tuple[float, ...], ...]
    own: tuple[float, ...]
    reason: str | None = None


def read_attention(batch: TokenBatch, replayer: Replayer, n_layers: int) -> tuple[AttentionReading, ...]:
    """Read every part of every row by one pass over prompts and answers, their last tokens included."""
    found = replayer.attention(batch, middle_layers(n_layers))
    begins = [own.start - batch.first for own in batch.scored]
    return tuple(
        _reading(found, row, slice(begin, end), middle_layers(n_layers))
        for row, parts in enumerate(batch.segments)
        for begin, end in pairwise(accumulate(parts, initial=begins[row]))
    )


def unread(reason: str) -> AttentionReading:
    """Where there is no reading."""
    return AttentionReading((), (), reason)


def _reading(found: Mapping[int, Neighbours], row: int, columns: slice, layers: Sequence[int]) -> AttentionReading:
    if any(layer not in found for layer in layers):
        return unread(UNREADABLE)
    previous, own = [], []
    for layer in layers:
        before = found[layer].previous[row, :, columns.start + 1 : columns.stop].double()
        previous.append(tuple(before[int(before.mean(1).argmax())].tolist()) if before.shape[1] else ())
        weights = found[layer].own[row, :, columns].double()
        own.append(float(weights.clamp(min=torch.finfo(torch.float32).tiny).log().mean()))
    if not all(map(math.isfinite, [*own, *(w for row in previous for w in row)])):
        return unread(NOT_FINITE)
    return AttentionReading(tuple(previous), tuple(own))
