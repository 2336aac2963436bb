"""Linear layers over a handful of positions on a CPU: the weights are what costs, and they are read once.

For 5 to 63 rows x, BLAS takes up to twice as long over x W^T as over W x^T (4864 x 896, ten rows, float32: 4.4 ms
against 2.6 ms; reading the weights takes 1.2 ms). CPUs without instructions for a half-precision dtype multiply
it at a fraction of their rate (34 rows: bfloat16 11.6 ms, float16 backward 274 ms); there the weights are converted to
float32 piece by piece in a core's cache (5.2 ms and 3.7 ms), and the result is rounded as the library's would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_FEW = range(5, 64)  # rows for which W x^T is the faster order, measured
_LARGE = 1 << 16  # entries of a weight below which the detour costs more than it saves
_PIECE = 1 << 18  # entries of a weight converted at a time


def multiplies_well(tensor: torch.Tensor) -> bool:
    """Whether products in the tensor's own dtype are fast and safe; else they are taken in float32.

    float16 would lose small probabilities and overflow sums. CPUs without bfloat16 units take it ten times as long.
    """
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu":
        return _cpu_has_bfloat16()
    return tensor.dtype != torch.float16


@cache
def _cpu_has_bfloat16() -> bool:
    """Asked once: every linear layer of a replay wants to know."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def linear_map(linear: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """What `linear` gives [..., out] for states [..., in], in the faster order; no gradient reaches its weight."""
    weight, rows = linear.weight, states.numel() // states.shape[-1]
    if not _helps(weight, rows) or states.dtype != weight.dtype:
        return F.linear(states, weight, linear.bias)
    product: Any = _Product.apply(states.reshape(rows, -1), weight)
    if linear.bias is not None:
        product = product + linear.bias
    return product.view(*states.shape[:-1], -1)


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient [n, in] with respect to x, from that with respect to x W^T [n, out]."""
    if multiplies_well(weight) or not _helps(weight, len(gradient)):
        return gradient @ weight
    factor, product = gradient.float(), torch.zeros(gradient.shape[0], weight.shape[1])
    for place, piece in _pieces(weight):
        product.addmm_(factor[:, place], piece)
    return product.to(gradient.dtype)


def _helps(weight: torch.Tensor, rows: int) -> bool:
    if weight.device.type != "cpu" or weight.numel() < _LARGE:
        return False
    return rows in _FEW if multiplies_well(weight) else rows >= _FEW.start


class _Product(torch.autograd.Function):
    """x W^T [n, out], differentiated with respect to x [n, in] alone (a shadow's weights need no gradient)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        factor = x.t().contiguous()
        if multiplies_well(weight):
            return torch.mm(weight, factor).t().contiguous()
        factor, product = factor.float(), torch.empty(weight.shape[0], x.shape[0])
        for place, piece in _pieces(weight):
            torch.mm(piece, factor, out=product[place])
        return product.t().to(x.dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return input_gradient(gradient, weight), None


def _pieces(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight's rows in float32, a few at a time; each piece lives until the next is asked for."""
    rows = max(1, _PIECE // weight.shape[1])
    buffer = torch.empty(min(rows, len(weight)), weight.shape[1])
    for begin in range(0, len(weight), rows):
        source = weight[begin : begin + rows]
        yield slice(begin, begin + len(source)), buffer[: len(source)].copy_(source)
