"""A read-only cut of a KV cache: the keys and values of everything before t*."""

from __future__ import annotations

from typing import Any

import torch
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
