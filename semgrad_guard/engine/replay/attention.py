"""Attention of the few positions that are replayed over all the keys before them, on a CPU.

The library's kernels are made for as many queries as keys. Here a handful of queries meets a long cache whose keys are
constants: of dK and dV only the replayed positions' rows are wanted, and key and value heads that several query heads
share need not be repeated for each. Heads that share keys are therefore taken together, as rows of one product, and
nothing is held for the backward pass but queries, keys and values as they came: the weights are computed again, a few
queries at a time. Products and softmax are taken in float32 (float64 for float64), whatever the model's dtype is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.replay.skinny_linear import precise_dtype

_NAME = "semgrad_guard_replay"
PLAIN = "sdpa"
"""The attention function that another one replaces."""
_MORE = ("position_bias", "softcap", "s_aux", "cache")  # options that some models pass to attention as well
_WEIGHTS = 1 << 18  # attention weights at a time, few enough to stay in a core's cache


class Reconfigured:
    """The modules that take the library's own "sdpa", and configurations that name another attention instead."""

    def __init__(self, modules: Iterable[nn.Module], name: str) -> None:
        configs: dict[int, Any] = {}
        self._replaced: list[tuple[nn.Module, Any, Any]] = []
        for module in modules:
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == PLAIN:
                if id(config) not in configs:
                    configs[id(config)] = copy.deepcopy(config)
                    configs[id(config)]._attn_implementation = name
                self._replaced.append((module, config, configs[id(config)]))

    @contextmanager
    def attending(self) -> Iterator[None]:
        """For the time of a block they attend by the other one."""
        for module, _, ours in self._replaced:
            vars(module)["config"] = ours
        try:
            yield
        finally:
            for module, usual, _ in self._replaced:
                vars(module)["config"] = usual


class Attentions:
    """The attention modules of a copy that take the library's own "sdpa"; others are left as they are."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        AttentionInterface.register(_NAME, attend)
        self.used = True
        self._replayed = Reconfigured((module for layer in layers for module in layer.modules()), _NAME)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """For the time of a block, positions with a graph attend as described above (unless `used` was cleared)."""
        with self._replayed.attending() if self.used else nullcontext():
            yield


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

    Where no gradient is recorded, no mask limits each query, the mask is computed from states and so has a
    gradient of its own, or a model needs more than a mask, the library's own attention answers.
    """
    plain = attention_mask is None or attention_mask.requires_grad
    plain = plain or any(options.get(name) is not None for name in _MORE)
    if plain or not query.requires_grad or query.device.type != "cpu":
        plain = ALL_ATTENTION_FUNCTIONS[PLAIN]
        return plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Any = _FewQueries.apply(query.to(precise_dtype(query)) * scale, key, value, attention_mask)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


class _FewQueries(torch.autograd.Function):
    """softmax(Q K^T + mask) V, differentiated by the queries and by the last n keys and values alone.

    The queries are the last n positions of the N; everything before them is a cache.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        ctx.save_for_backward(query, key, value, mask)
        heads = _Heads(query, key, value, mask)
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for part in heads.parts():
            output[:, :, part] = heads.apart(torch.bmm(heads.weights(part), heads.values))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (query, key, value, mask), (gradient,) = ctx.saved_tensors, gradients
        heads = _Heads(query, key, value, mask)
        n, groups = query.shape[2], heads.keys.shape[0]
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        new_keys = heads.keys.new_zeros(groups, n, key.shape[-1])
        new_values = heads.values.new_zeros(groups, n, value.shape[-1])
        for part in heads.parts():
            weights, arriving = heads.weights(part), heads.together(gradient[:, :, part])
            new_values.baddbmm_(weights[:, :, -n:].transpose(1, 2), arriving)
            by_weights = torch.bmm(arriving, heads.values.transpose(1, 2)).mul_(weights)
            by_scores = by_weights.addcmul_(weights, by_weights.sum(-1, keepdim=True), value=-1)
            by_query[:, :, part] = heads.apart(torch.bmm(by_scores, heads.keys))
            new_keys.baddbmm_(by_scores[:, :, -n:].transpose(1, 2), heads.together(query[:, :, part]))
        by_key[:, :, -n:] = new_keys.unflatten(0, key.shape[:2])
        by_value[:, :, -n:] = new_values.unflatten(0, value.shape[:2])
        return by_query, by_key, by_value, None


class _Heads:
    """Keys and values [B G, N, .], and queries of the H / G heads that share them as rows [B G, H / G n, .]."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> None:
        self._query, self._shape = query, (*key.shape[:2], query.shape[1] // key.shape[1])
        self.keys, self.values = (x.flatten(0, 1).to(query.dtype) for x in (key, value))
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        self._mask = mask.to(query.dtype)

    def parts(self) -> Iterator[slice]:
        """The queries, a few at a time."""
        heads, n, positions = self._query.shape[0] * self._query.shape[1], self._query.shape[2], self.keys.shape[1]
        size = max(1, _WEIGHTS // (heads * positions))
        return (slice(start, min(start + size, n)) for start in range(0, n, size))

    def weights(self, part: slice) -> torch.Tensor:
        """The attention that the queries of `part` give each key [B G, H / G part, N]; they add up to 1."""
        scores = torch.bmm(self.together(self._query[:, :, part]), self.keys.transpose(1, 2))
        mask = self._mask[:, :, part, : self.keys.shape[1]]
        heads = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, self._shape[1:])
        scores.view(*self._shape, -1, scores.shape[-1]).add_(heads)
        return scores.softmax(-1)

    def together(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, H, part, .] to [B G, H / G part, .]."""
        return rows.reshape(self._shape[0] * self._shape[1], -1, rows.shape[-1])

    def apart(self, rows: torch.Tensor) -> torch.Tensor:
        """[B G, H / G part, .] to [B, H, part, .]."""
        return rows.view(self._shape[0], self._shape[1] * self._shape[2], -1, rows.shape[-1])
