"""Linear layers over a handful of positions on a CPU: the weights are what costs, and they are read once.

For 5 to 63 rows x, BLAS takes up to twice as long over x W^T as over W x^T on an Intel (4864 x 896, ten rows, float32:
4.4 ms against 2.6 ms; reading the weights takes 1.2 ms), and half as long on an AMD (2.9 ms against 6.5 ms). CPUs
without instructions for a half-precision dtype multiply it at a fraction of their rate (34 rows: bfloat16 11.6 ms,
float16 backward 274 ms); there the weights are converted to float32 piece by piece in a core's cache (5.2 ms and
3.7 ms), and the result is rounded as the library's would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        return bool(_capabilities().get("amx_bf16") or _capabilities().get("avx512_bf16"))
    return tensor.dtype != torch.float16


def factor_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products with it are taken."""
    return tensor.dtype if multiplies_well(tensor) else torch.float32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [n, out] for x [n, in] and a weight [out, in] of one dtype, in the faster order."""
    if x.device.type == "cpu" and len(x) in _FEW and _weight_first():
        return torch.mm(weight, x.t().contiguous()).t()
    return torch.mm(x, weight.t())


def converted(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of a weight [out, in] in `dtype` and their place: all of them, where that is their own dtype.

    Else, on a CPU, few enough at a time to stay in a core's cache; each piece lives until the next is asked for.
    """
    if weight.dtype == dtype or weight.device.type != "cpu":
        yield slice(None), weight.to(dtype)
        return
    rows = max(1, _PIECE // weight.shape[1])
    buffer = torch.empty(min(rows, len(weight)), weight.shape[1], dtype=dtype)
    for begin in range(0, len(weight), rows):
        source = weight[begin : begin + rows]
        yield slice(begin, begin + len(source)), buffer[: len(source)].copy_(source)


@cache
def _capabilities() -> Mapping[str, Any]:
    """The CPU's, asked for once: every linear layer of a replay wants to know."""
    return torch.cpu.get_capabilities()


def _weight_first() -> bool:
    return "Intel" in str(_capabilities().get("cpu_name"))


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
    factor, total = gradient.float(), torch.zeros(gradient.shape[0], weight.shape[1])
    for place, rows in converted(weight, torch.float32):
        total.addmm_(factor[:, place], rows)
    return total.to(gradient.dtype)


def _helps(weight: torch.Tensor, rows: int) -> bool:
    if weight.device.type != "cpu" or weight.numel() < _LARGE:
        return False
    return rows in _FEW and _weight_first() if multiplies_well(weight) else rows >= _FEW.start


class _Product(torch.autograd.Function):
    """x W^T [n, out], differentiated with respect to x [n, in] alone (a shadow's weights need no gradient)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        factor = x.to(factor_dtype(weight))
        parts = [product(factor, rows) for _, rows in converted(weight, factor.dtype)]
        return torch.cat(parts, dim=1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return input_gradient(gradient, weight), None
