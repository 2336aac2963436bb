"""Linear layers over a handful of positions on a CPU: reading the weights costs most, and they are read once.

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
_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
"""The names of an x86 processor's instructions for a half-precision dtype."""


def lacks_units(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device is an x86 processor without instructions for that half-precision dtype.

    There products of several rows take up to seven times as long as in float32 (measured with 40 rows).
    """
    known = device.type == "cpu" and _capabilities().get("architecture") == "x86_64"
    return known and dtype in _UNITS and not _has_units(dtype)


def _has_units(dtype: torch.dtype) -> bool:
    return any(_capabilities().get(unit) for unit in _UNITS[dtype])


def multiplies_well(tensor: torch.Tensor) -> bool:
    """Whether products in the tensor's own dtype are fast and safe; else they are taken in float32.

    float16 would lose small probabilities and overflow sums. CPUs without bfloat16 units take it ten times as long.
    """
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu":
        return _has_units(tensor.dtype)
    return tensor.dtype != torch.float16


def factor_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products with it are taken."""
    return tensor.dtype if multiplies_well(tensor) else torch.float32


def precise_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which exponentials and sums over it are taken."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [n, out] for x [n, in] and a weight [out, in], in x's dtype and the faster order."""
    if x.device.type == "cpu" and _weight_first(len(x)):
        factor = x.t().contiguous()
        parts = [torch.mm(rows, factor).t() for _, rows in _converted(weight, x.dtype)]
    else:
        parts = [torch.mm(x, rows.t()) for _, rows in _converted(weight, x.dtype)]
    return torch.cat(parts, dim=1)


def add_product(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """total [n, in] += gradient [n, out] W, the products in the gradient's dtype."""
    for place, rows in _converted(weight, gradient.dtype):
        if gradient.dtype == total.dtype:
            total.addmm_(gradient[:, place], rows)
        else:
            total += gradient[:, place] @ rows


def _converted(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of a weight [out, in] in `dtype` and their place: all of them, where that is their own dtype.

    Else, on a CPU, few enough at a time to stay in a core's cache; each piece lives until the next is taken.
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
    """The CPU's, read once: every linear layer of a replay wants to know."""
    return torch.cpu.get_capabilities()


def _is_intel() -> bool:
    return "Intel" in str(_capabilities().get("cpu_name"))


def _weight_first(rows: int) -> bool:
    """Whether W x^T is the faster order for so many rows x."""
    return rows in _FEW and _is_intel()


def linear_map(linear: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """The result of `linear` [..., out] for states [..., in], in the faster order; no gradient reaches its weight."""
    weight, rows = linear.weight, states.numel() // states.shape[-1]
    if not _helps(weight, rows) or states.dtype != weight.dtype:
        return F.linear(states, weight, linear.bias)
    output: Any = _Product.apply(states.reshape(rows, -1), weight)
    if linear.bias is not None:
        output = output + linear.bias
    return output.view(*states.shape[:-1], -1)


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient [n, in] with respect to x, from that with respect to x W^T [n, out]."""
    if multiplies_well(weight) or not _helps(weight, len(gradient)):
        return gradient @ weight
    total = torch.zeros(gradient.shape[0], weight.shape[1])
    add_product(total, gradient.float(), weight)
    return total.to(gradient.dtype)


def _helps(weight: torch.Tensor, rows: int) -> bool:
    if weight.device.type != "cpu" or weight.numel() < _LARGE:
        return False
    return _weight_first(rows) if multiplies_well(weight) else rows >= _FEW.start


class _Product(torch.autograd.Function):
    """x W^T [n, out], differentiated with respect to x [n, in] alone (a copy's weights need no gradient)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return product(x.to(factor_dtype(weight)), weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return input_gradient(gradient, weight), None
