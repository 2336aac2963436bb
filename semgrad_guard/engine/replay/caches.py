"""KV caches: read-only cuts before t*, the rows of a batch that come and go, and the prompts that were read last.

The rows of a batch end in one column, and begin where their prompt begins. The messages of a chat repeat all earlier
ones, and the prompts of one RAG chain begin with the same instructions: keys and values of those tokens do not depend
on later ones, so a prompt is read only from where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from semgrad_guard.errors import UnsupportedModelError

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name that the installed transformers gives a model's cache, in its arguments and its outputs."""


def cache_of(output: Any) -> Cache:
    """The cache that a model's `generate` left in its output."""
    left: Cache = getattr(output, CACHE)
    return left


class PrefixLayer(DynamicLayer):
    """One layer's keys and values [batch, heads, length, d] of the positions before the cut.

    `update` answers with prefix and new states joined and stores nothing, so that one prefix serves any number of
    replays and the cache it was cut from stays as it was.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = self._prefix = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._prefix
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def growing_cache() -> DynamicCache:
    """An empty cache that keeps every key, sliding windows too: the mask alone decides what a query sees.

    (A `DynamicCache` made from the model's config drops keys outside the window, which a replay would miss.)
    """
    return DynamicCache()


def can_be_cut(cache: Cache, length: int) -> bool:
    """Whether every layer that was written to is a plain growing attention cache of `length` positions or more."""
    layers: list[Any] = cache.layers
    written = [layer for layer in layers if layer.is_initialized]
    return bool(written) and all(type(layer) is DynamicLayer and layer.get_seq_length() >= length for layer in written)


def cut(cache: Cache, length: int) -> Cache | None:
    """The first `length` positions of `cache` as a read-only cache; None for length 0.

    A layer that was never written to (it was left out of the pass) stays empty.

    Raises:
        UnsupportedModelError: a layer is no plain growing attention cache, or holds fewer than `length` positions.
    """
    if length == 0:
        return None
    if not can_be_cut(cache, length):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise UnsupportedModelError(f"a cache of {', '.join(kinds)} cannot be cut at position {length}")
    layers: list[Any] = cache.layers
    return Cache(layers=[_prefix(layer, length) if layer.is_initialized else DynamicLayer() for layer in layers])


def _prefix(layer: Any, length: int) -> PrefixLayer:
    return PrefixLayer(layer.keys[..., :length, :], layer.values[..., :length, :])


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
    cache = growing_cache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _widened(half: torch.Tensor, columns: int) -> torch.Tensor:
    return F.pad(half, (0, 0, columns - half.shape[-2], 0))


@dataclass(frozen=True)
class _Entry:
    """Token ids and, for each layer, their keys and values [1, heads, ids, d]; never written to."""

    ids: tuple[int, ...]
    layers: tuple[_KeysValues, ...]

    @property
    def bytes(self) -> int:
        return sum(half.numel() * half.itemsize for layer in self.layers for half in layer)


class PromptStore:
    """The sequences that one model read last, as many as fit a budget. Callers hold the engine's lock."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # the one used longest ago comes first

    @property
    def bytes(self) -> int:
        """The bytes held."""
        return sum(entry.bytes for entry in self._entries)

    def begin(self, ids: Sequence[int], most: int) -> Cache:
        """A growing cache of the longest beginning of `ids` that is known, `most` tokens of it at the most."""
        entry = max(reversed(self._entries), key=lambda known: _common(known.ids, ids), default=None)
        length = 0 if entry is None else min(_common(entry.ids, ids), most)
        if entry is None or length == 0:
            return growing_cache()
        self._entries.remove(entry)
        self._entries.append(entry)
        return _made([[half[..., :length, :] for half in layer] for layer in entry.layers])

    def keep(self, ids: Sequence[int], cache: Cache, budget: int) -> None:
        """Remember the tokens read in the place of those that they continue, within `budget` bytes.

        The cache holds one row, and the tokens of `ids` without the last one or more.
        """
        length = min(cache.get_seq_length(), len(ids))
        if budget and length and can_be_cut(cache, length):
            layers = tuple((keys[..., :length, :], values[..., :length, :]) for keys, values in _layers(cache))
            new = _Entry(tuple(ids[:length]), layers)
            self._entries = [old for old in self._entries if _common(old.ids, new.ids) < len(old.ids)]
            self._entries.append(new)
        self.trim(budget)

    def trim(self, budget: int) -> None:
        """Forget the sequences used longest ago until the rest fit `budget` bytes."""
        while self._entries and self.bytes > budget:
            del self._entries[0]


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
