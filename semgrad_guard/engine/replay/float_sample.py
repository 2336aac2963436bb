"""A model in a wider number format, or a few of its layers, for a check that its own format's noise would blur.

Which way of replaying is exact depends on a model's code, not on its numbers. So a sample need not hold all layers: one
of each kind in the lower and in the upper half represents the rest, which return their inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.replay.hooks import Bypass
from semgrad_guard.engine.replay.weight_sharing_copy import weight_sharing_copy

_ALL_BYTES = 256 << 20  # in the wider format, up to which every layer is taken
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""The format in which a format's own rounding does not show."""


def float_sample(
    model: nn.Module, layers_path: str, first: int, wider: torch.dtype, *, returns_tuples: bool
) -> nn.Module:
    """A copy of `model` in `wider` that shares the tensors that are as wide already, for replays from layer `first` on.

    Linear maps with quantized weights are replaced by plain ones of their shape with random weights: the check is of
    the code around the layers, not of their numbers.
    """
    twin = weight_sharing_copy(model)
    layers = cast(nn.ModuleList, twin.get_submodule(layers_path))
    if sum(p.numel() for p in twin.parameters()) * wider.itemsize > _ALL_BYTES:
        kept = _representatives(layers, first)
        for index, layer in enumerate(layers):
            if index not in kept:
                layers[index] = Bypass.of(layer, returns_tuple=returns_tuples)
    _widen(twin, wider, {}, torch.Generator().manual_seed(0))
    return twin


def _representatives(layers: Sequence[nn.Module] | nn.ModuleList, first: int) -> set[int]:
    """The first layer of each kind below `first`, the first and the last of each from there on."""
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((index < first, _kind(layer)), []).append(index)
    return {index for (below, _), found in kinds.items() for index in ((found[0],) if below else (found[0], found[-1]))}  # type: ignore[misc]


def _kind(layer: nn.Module) -> Hashable:
    """The traits of a layer: the types of their modules, the shapes of their weights, and plain settings."""
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and "idx" not in name)
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return (*(type(module) for module in layer.modules()), *settings, *shapes, *windows)


def _widen(module: nn.Module, wider: torch.dtype, done: dict[int, Any], generator: torch.Generator) -> None:
    """Turn a copy's tensors into `wider`, in place of the copy's references alone. Layers left out stay as they are."""
    if isinstance(module, Bypass) or id(module) in done:
        return
    done[id(module)] = module
    for name, parameter in module._parameters.items():
        if parameter is not None and _is_narrower(parameter, wider):
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.detach().to(wider), requires_grad=False)
            module._parameters[name] = done[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None and _is_narrower(buffer, wider):
            module._buffers[name] = buffer.detach().to(wider)
    for name, child in module._modules.items():
        if child is None:
            continue
        if _is_quantized_map(child):
            module._modules[name] = _plain_map(child, wider, generator)
        else:
            _widen(child, wider, done, generator)


def _is_narrower(tensor: torch.Tensor, wider: torch.dtype) -> bool:
    return tensor.dtype in WIDER and tensor.dtype.itemsize < wider.itemsize


def _is_quantized_map(module: nn.Module) -> bool:
    own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    plain = all(type(tensor.data) is torch.Tensor and tensor.is_floating_point() for tensor in own)
    return hasattr(module, "in_features") and hasattr(module, "out_features") and not plain


def _plain_map(quantized: nn.Module, wider: torch.dtype, generator: torch.Generator) -> nn.Linear:
    inputs, outputs = int(cast(Any, quantized.in_features)), int(cast(Any, quantized.out_features))
    device = next(chain(quantized.parameters(), quantized.buffers())).device
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    plain.weight = nn.Parameter(weight.to(device, wider), requires_grad=False)
    return plain
