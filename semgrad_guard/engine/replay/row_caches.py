"""KV caches of a batch whose rows come and go: all end in one column, and begin where their prompt begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_KeysValues = tuple[torch.Tensor, torch.Tensor]


def can_be_taken_apart(cache: Cache) -> bool:
    """Whether every layer is a plain growing attention cache that was written to."""
    layers: list[Any] = cache.layers
    return all(type(layer) is DynamicLayer and layer.is_initialized for layer in layers)


def stacked(caches: Sequence[Cache]) -> DynamicCache:
    """Caches of the same model below each other, the shorter ones filled up with zeros on the left."""
    longest = max(cache.get_seq_length() for cache in caches)
    below: list[list[torch.Tensor]] = []
    for layer in zip(*map(_layers, caches), strict=True):
        below.append([torch.cat([_widened(half, longest) for half in halves]) for halves in zip(*layer, strict=True)])
    return _made(below)


def kept(cache: Cache, rows: Sequence[int], start: int, end: int | None = None) -> DynamicCache:
    """A copy of some rows and of the columns [start, end), that holds nothing of the rest."""
    index = torch.tensor(list(rows))
    return _made([[half[index.to(half.device), :, start:end] for half in layer] for layer in _layers(cache)])


def _layers(cache: Cache) -> list[_KeysValues]:
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def _made(layers: Sequence[Sequence[torch.Tensor]]) -> DynamicCache:
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _widened(half: torch.Tensor, columns: int) -> torch.Tensor:
    return F.pad(half, (0, 0, columns - half.shape[-2], 0))
