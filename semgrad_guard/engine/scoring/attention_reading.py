"""How the tokens of an answer attend to each other in a model's middle layers: one pass, without a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from semgrad_guard.engine.replay.attention_weights import Neighbours, middle_layers
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.replay.replayer import Replayer

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
    """Read every row of a batch by one pass over prompts and answers, their last tokens included."""
    found = replayer.attention(batch, middle_layers(n_layers))
    columns = [slice(own.start - batch.first, own.stop - batch.first) for own in batch.scored]
    return tuple(_reading(found, row, own, middle_layers(n_layers)) for row, own in enumerate(columns))


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
