"""The results of passes through a model's copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Replayed:
    """A forward pass with a graph: h^(l) of the span and `final` states before the head, [B, columns, d] each.

    `hidden` begins at column `start`, `final` at column `head_start`; `token_axis` is the axis of `hidden` that counts
    columns (a model with several residual streams has more axes). Where the pass went through the head (full tier),
    there are `logits` from `head_start` instead, and `head_weight` [V, d] is the factor of the head alone;
    `raw_logits` is the head's own output, without a graph, where its module was called. `kept_logits` is the head's
    output for each response token, where its generation kept it.
    """

    start: int
    final: torch.Tensor | None
    hidden: tuple[torch.Tensor, ...]
    head_start: int
    logits: torch.Tensor | None = None
    raw_logits: torch.Tensor | None = None
    head_weight: torch.Tensor | None = None
    kept_logits: Sequence[torch.Tensor] | None = None
    token_axis: int = 1


@dataclass(frozen=True)
class Observed:
    """A pass without a graph: the states before the head, and h^(l), [B, columns, d] each, from column `start` on."""

    start: int
    final: torch.Tensor
    hidden: torch.Tensor
