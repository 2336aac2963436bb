"""The attention of the last positions of a pass to the one before and to themselves, read while the pass runs.

Library kernels return no attention weights, so a layer's queries of these positions meet its keys once more.
Weights are believed only where they reproduce what the layer's own attention has answered: a cap, a bias or a sink that
this module does not know of is found by that, whatever its name is. Models that compute weights themselves ("eager")
hand out their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.replay.kernels import PLAIN, Reconfigured, precise_dtype

_NAME = "semgrad_guard_weights"
_OWN = "eager"
_TOLERANCE = 1e-4  # of the norm: the difference of kernels that add in another order
_ROUNDINGS = 4  # of a half-precision output


class Neighbours(NamedTuple):
    """The weights of the last T positions [B, H, T]: for the position before each, and for itself."""

    previous: torch.Tensor
    own: torch.Tensor


class AttentionWeights:
    """The attention of the layers in a pass, by layer; a layer is missing where its weights are not known."""

    def __init__(self, layers: Mapping[int, nn.Module], count: int) -> None:
        """Of `count` last positions."""
        AttentionInterface.register(_NAME, _attend)
        self._layers, self._count = layers, count
        self._found: dict[int, list[Neighbours | None]] = {}
        self._layer_of = {id(module): index for index, layer in layers.items() for module in layer.modules()}

    @property
    def found(self) -> Mapping[int, Neighbours]:
        """The layers that attended once, and how."""
        return {layer: passes[0] for layer, passes in self._found.items() if len(passes) == 1 and passes[0] is not None}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take in the weights of the passes of this block."""
        with ExitStack() as stack:
            modules = [(index, module) for index, layer in self._layers.items() for module in layer.modules()]
            stack.enter_context(Reconfigured((module for _, module in modules), _NAME).attending())
            for index, module in modules:
                if getattr(getattr(module, "config", None), "_attn_implementation", None) == _OWN:
                    stack.callback(module.register_forward_hook(partial(self._take_own, index)).remove)
            token = _WATCHED.set(self)
            stack.callback(_WATCHED.reset, token)
            yield

    def _take_own(self, index: int, _module: nn.Module, _given: Any, output: Any) -> None:
        """Take in the weights that a module returns by itself."""
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None  # pyright: ignore
        if not isinstance(weights, torch.Tensor) or weights.ndim != 4:
            return
        if weights.shape[2] == weights.shape[3] > self._count:
            self._keep(index, weights[:, :, -self._count :].to(precise_dtype(weights)))

    def see(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> None:
        """Take in the inputs of attention; `options` holds its mask, its scale, and its output."""
        index = self._layer_of.get(id(module))
        if index is None:
            return
        if query.shape[2] != key.shape[2] or query.shape[2] < self._count + 1:
            self._found.setdefault(index, []).append(None)
            return
        weights, answered = _weights(query, key, self._count, **options), options["output"][:, -self._count :]
        groups = query.shape[1] // key.shape[1]
        expected = (weights @ value.to(weights.dtype).repeat_interleave(groups, 1)).transpose(1, 2)
        off, size = (expected - answered).norm(), expected.norm()
        bound = max(_TOLERANCE, _ROUNDINGS * torch.finfo(answered.dtype).eps)
        if bool(off <= bound * size):
            self._keep(index, weights)
        else:
            self._found.setdefault(index, []).append(None)

    def _keep(self, index: int, weights: torch.Tensor) -> None:
        # The last T rows [B, H, T, N]: row i belongs to column N - T + i.
        first = weights.shape[3] - self._count
        own = weights[..., first:].diagonal(dim1=2, dim2=3)
        previous = weights[..., first - 1 : -1].diagonal(dim1=2, dim2=3)
        self._found.setdefault(index, []).append(Neighbours(previous.clone(), own.clone()))


_WATCHED: ContextVar[AttentionWeights | None] = ContextVar("watched", default=None)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: the library's own attention answers, and is watched."""
    plain = ALL_ATTENTION_FUNCTIONS[PLAIN]
    output = plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    watch = _WATCHED.get()
    if watch is not None:
        watch.see(module, query, key, value, mask=attention_mask, scaling=scaling, output=output[0])
    return output


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    *,
    mask: torch.Tensor | None,
    scaling: float | None,
    output: torch.Tensor,
) -> torch.Tensor:
    """softmax(Q K^T + mask) of the last `count` queries: [B, H, count, N]; without a mask, causal."""
    dtype, total = precise_dtype(output), key.shape[2]
    batch, heads, _, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    rows = query[:, :, -count:].to(dtype).reshape(batch, key.shape[1], -1, width) * scale
    scores = (rows @ key.to(dtype).transpose(2, 3)).reshape(batch, heads, count, total)
    if mask is None:
        columns = torch.arange(total, device=scores.device)
        mask = columns <= columns[-count:, None]
    else:
        mask = mask[..., -count:, :total]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def middle_layers(n_layers: int) -> Sequence[int]:
    """The middle third, as RAUQ takes it: floor(L / 3) to ceil(2 L / 3), counted from 0."""
    return range(n_layers // 3, min(n_layers, -(-2 * n_layers // 3) + 1))
