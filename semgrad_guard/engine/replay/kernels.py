"""Products and attention where the library's own take much longer: half precision on many CPUs, few queries, long rows.

CPUs without instructions for a half-precision dtype multiply it at a fraction of their rate (34 rows: bfloat16 11.6 ms,
float16 backward 274 ms); there the weights are converted to float32 piece by piece in a core's cache (5.2 ms and
3.7 ms), and the result is rounded as the library's would be.

The library's attention differentiates all keys and values. In a replay those before the queries' own need no gradient,
and key and value heads that several query heads share are taken together, as rows of one product, in place of being
repeated. (135M parameters, 1,000 tokens and 8: a score takes .6 of the time that it takes with "sdpa".)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PIECE = 1 << 18  # entries of a weight converted at a time
_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
"""The names of an x86 processor's instructions for a half-precision dtype."""


@cache
def _capabilities() -> Mapping[str, Any]:
    """The CPU's, read once: every product wants to know."""
    return torch.cpu.get_capabilities()


def lacks_units(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device is an x86 processor without instructions for that half-precision dtype.

    There products of several rows take up to seven times as long as in float32 (measured with 40 rows).
    """
    known = device.type == "cpu" and _capabilities().get("architecture") == "x86_64"
    return known and dtype in _UNITS and not _has_units(dtype)


def _has_units(dtype: torch.dtype) -> bool:
    return any(_capabilities().get(unit) for unit in _UNITS[dtype])


def factor_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products with it are taken: its own where they are fast and safe, else float32.

    float16 would lose small probabilities and overflow sums. CPUs without bfloat16 units take it ten times as long.
    """
    is_slow = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not _has_units(tensor.dtype)
    return torch.float32 if is_slow or tensor.dtype == torch.float16 else tensor.dtype


def precise_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which exponentials and sums over it are taken."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [n, out] for x [n, in] and a weight [out, in], in x's dtype."""
    pieces = [torch.mm(x, rows.t()) for _, rows in _converted(weight, x.dtype)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def add_product(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """total [n, in] += gradient [n, out] W, the products in the gradient's dtype."""
    for place, rows in _converted(weight, gradient.dtype):
        if gradient.dtype == total.dtype:
            total.addmm_(gradient[:, place], rows)
        else:
            total += gradient[:, place] @ rows


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient [n, in] with respect to x, from that with respect to x W^T [n, out]."""
    if factor_dtype(weight) == weight.dtype or weight.device.type != "cpu":
        return gradient @ weight
    total = torch.zeros(gradient.shape[0], weight.shape[1])
    add_product(total, gradient.float(), weight)
    return total.to(gradient.dtype)


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


_CHUNK = 64  # vocabulary entries that are first searched for their greatest alone


def greatest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Where the greatest entries of each row [m, V] are: [m, count], in any order.

    They lie in the chunks with the greatest maxima, a chunk being every `stride`-th entry. (`topk` takes six times as
    long over bfloat16's many equal values, `argmax` over any, and maxima of neighbours.)
    """
    m, vocabulary = rows.shape
    if vocabulary < 2 * _CHUNK:
        return rows.topk(count).indices
    stride = vocabulary // _CHUNK
    whole = stride * _CHUNK
    chunks = rows[:, :whole].unflatten(1, (_CHUNK, stride)).amax(1).topk(min(count, stride)).indices
    within = torch.arange(0, whole, stride, device=rows.device)
    rest = torch.arange(whole, vocabulary, device=rows.device).expand(m, -1)
    places = torch.cat([(chunks[:, :, None] + within).flatten(1), rest], dim=1)
    return places.gather(1, rows.gather(1, places).topk(count).indices)


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
    """For the time of a block the modules of these configurations, a twin's own, attend by `attend`."""
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
    where a model needs more than a mask, the library's own attention answers. Products and softmax are taken in float32
    (float64 for float64), whatever the model's dtype is.
    """
    batch, heads, n, d = query.shape
    plain = attention_mask is None or attention_mask.requires_grad or batch * heads * n * key.shape[2] > _WEIGHTS
    if plain or any(options.get(name) is not None for name in _MORE):
        return ALL_ATTENTION_FUNCTIONS[_REPLACED](module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = d**-0.5 if scaling is None else scaling
    output: Any = _Attended.apply(scale, query, key, value, attention_mask)
    return output.transpose(1, 2).contiguous(), None


class _Attended(torch.autograd.Function):
    """softmax(Q K^T + mask) V, which is computed again for its backward pass: a graph would hold the most for this."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Any) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.scale = scale
        return _attended(*inputs, scale=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, mask = ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            output = _attended(*inputs, mask, scale=ctx.scale)
        return (None, *torch.autograd.grad(output, inputs, gradients), None)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """[B, H, n, e]; keys and values before the queries' own let no gradient pass."""
    (batch, heads, n, _), groups, first = query.shape, key.shape[1], key.shape[2] - query.shape[2]
    dtype = precise_dtype(query)
    rows = (query.to(dtype) * scale).reshape(batch, groups, n * heads // groups, -1)
    fixed = [half[:, :, :first].detach().to(dtype) for half in (key, value)]
    live = [half[:, :, first:].to(dtype) for half in (key, value)]
    scores = torch.cat([rows @ keys.transpose(2, 3) for keys in (fixed[0], live[0])], dim=3)
    # One mask for all heads, or one for each: those of the heads that share keys lie side by side.
    mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1))
    shares = (scores.view(batch, groups, heads // groups, n, -1) + mask).softmax(-1).view(scores.shape)
    found = shares[..., :first] @ fixed[1] + shares[..., first:] @ live[1]
    return found.view(batch, heads, n, -1).to(query.dtype)


AttentionInterface.register(_NAME, attend)
