"""The attention of a replay: a handful of queries over many keys, most of which are constants.

The library's kernels differentiate all keys and values. Here those before the queries' own need no gradient, and key
and value heads that several query heads share are taken together, as rows of one product, in place of being repeated.
(135M parameters, 1,000 tokens and 8: a score takes .6 of the time that it takes with "sdpa".) Products and softmax are
taken in float32 (float64 for float64), whatever the model's dtype is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.replay.products import precise_dtype

_NAME, _REPLACED = "semgrad_guard_replay", "sdpa"
_MORE = ("position_bias", "softcap", "s_aux", "cache")  # options that some models pass to attention as well
_WEIGHTS = 1 << 22  # entries of one layer's attention weights, which are kept for the backward pass


def configs_of(layers: Iterable[nn.Module]) -> list[Any]:
    """The configurations by which modules of some layers take the library's own "sdpa"."""
    known = [getattr(module, "config", None) for layer in layers for module in layer.modules()]
    found = {id(config): config for config in known if getattr(config, "_attn_implementation", None) == _REPLACED}
    return list(found.values())


@contextmanager
def attending(configs: Iterable[Any]) -> Iterator[None]:
    """For the time of a block the modules of these configurations, a twin's own, attend as described above."""
    try:
        for config in configs:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = _REPLACED


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, H, n, d], key [B, G, N, d], value [B, G, N, e] to [B, n, H, e].

    The queries are the last n of the N positions. Where they are many, where the mask has a gradient of its own, or
    where a model needs more than a mask, the library's own attention answers.
    """
    weights = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    plain = attention_mask is None or attention_mask.requires_grad or weights > _WEIGHTS
    if plain or any(options.get(name) is not None for name in _MORE):
        return ALL_ATTENTION_FUNCTIONS[_REPLACED](module, query, key, value, attention_mask, scaling=scaling, **options)
    (batch, heads, n, d), groups, first = query.shape, key.shape[1], key.shape[2] - query.shape[2]
    dtype = precise_dtype(query)
    rows = (query.to(dtype) * (d**-0.5 if scaling is None else scaling)).reshape(batch, groups, -1, d)
    constants = (key[:, :, :first].detach(), value[:, :, :first].detach())
    parts = [[x.to(dtype) for x in own] for own in (constants, (key[:, :, first:], value[:, :, first:]))]
    scores = torch.cat([rows @ keys.transpose(2, 3) for keys, _ in parts], dim=3)
    mask = torch.as_tensor(attention_mask)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    by_head = scores.view(batch, groups, heads // groups, n, -1)
    by_head = by_head + (mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1)))
    shares = by_head.softmax(-1).view(scores.shape).split([first, n], dim=3)
    fixed, live = (own @ values for own, (_, values) in zip(shares, parts, strict=True))
    found = fixed + live
    return found.view(batch, heads, n, -1).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, attend)
