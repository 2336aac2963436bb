"""The linear maps and the attention of a replay: a handful of positions over large weights, or over a long cache.

Linear layers on a CPU: reading the weights costs most, and they are read once. For 5 to 63 rows x, BLAS takes up to
twice as long over x W^T as over W x^T on an Intel (4864 x 896, ten rows, float32: 4.4 ms against 2.6 ms; reading the
weights takes 1.2 ms), and half as long on an AMD (2.9 ms against 6.5 ms). CPUs without instructions for a
half-precision dtype multiply it at a fraction of their rate (34 rows: bfloat16 11.6 ms, float16 backward 274 ms); there
the weights are converted to float32 piece by piece in a core's cache (5.2 ms and 3.7 ms), and the result is rounded as
the library's would be.

`Projections`: a replay needs the outputs of every linear map of the upper layers, and its generation has just computed
them, position by position. Kept, they leave attention, norms and activations to be run again, which read no weights;
the graph is the same, and its backward pass reads the weights once. Maps whose outputs were not kept take the faster
order for few rows. Generation stays outside, so that answers are bit for bit the user's model's.

`Attentions`: the library's kernels are made for as many queries as keys. Here a handful of queries meets a long cache
whose keys are constants: of dK and dV only the replayed positions' rows are wanted, and key and value heads that
several query heads share need not be repeated for each. Heads that share keys are therefore taken together, as rows of
one product, and nothing is held for the backward pass but queries, keys and values as they came: the weights are
computed again, a few queries at a time. Products and softmax are taken in float32 (float64 for float64), whatever the
model's dtype is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.models.architecture import has_plain_weight

_FEW = range(5, 64)  # rows for which W x^T is the faster order, measured
_LARGE = 1 << 16  # entries of a weight below which the detour costs more than it saves
_PIECE = 1 << 18  # entries of a weight converted at a time
_CHUNK = 64  # vocabulary entries that are first searched for their greatest alone
_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
"""The names of an x86 processor's instructions for a half-precision dtype."""
_NAME = "semgrad_guard_replay"
PLAIN = "sdpa"
"""The attention function that another one replaces."""
_MORE = ("position_bias", "softcap", "s_aux", "cache")  # options that some models pass to attention as well
_WEIGHTS = 1 << 18  # attention weights at a time, few enough to stay in a core's cache


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


def _weight_first(rows: int) -> bool:
    """Whether W x^T is the faster order for so many rows x."""
    return rows in _FEW and "Intel" in str(_capabilities().get("cpu_name"))


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


Place = tuple[int, str]
"""A linear map by its decoder layer's number and its path in there."""

Outputs = Mapping[Place, torch.Tensor]
"""The outputs of linear maps: [B, positions, out] each."""


class Projections:
    """All plain linear maps of some decoder layers. Not re-entrant: callers hold the engine's lock."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._replaying = False
        self._known: Outputs = {}
        self.copies = False  # whether known outputs are copied: code may change them in place
        self._listener: Callable[[Place, torch.Tensor], None] | None = None
        for number, layer in enumerate(layers):
            for path, linear in layer.named_modules():
                if type(linear) is nn.Linear and has_plain_weight(linear) and "forward" not in vars(linear):
                    vars(linear)["forward"] = partial(self._forward, linear, (number, path))

    @contextmanager
    def replaying(self, known: Outputs | None = None) -> Iterator[None]:
        """For the time of a block: the faster ways, and `known` outputs instead of products where shapes agree."""
        before = self._replaying, self._known
        self._replaying, self._known = True, known or {}
        try:
            yield
        finally:
            self._replaying, self._known = before

    @contextmanager
    def listening(self, listener: Callable[[Place, torch.Tensor], None]) -> Iterator[None]:
        """For the time of a block, hand the listener the output of every linear map."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _forward(self, linear: nn.Linear, place: Place, states: torch.Tensor) -> torch.Tensor:
        if self._replaying:
            known = self._known.get(place)
            if known is None or known.shape[:-1] != states.shape[:-1]:
                return linear_map(linear, states)
            output: Any = _Known.apply(states, linear.weight, known, self.copies)
            return output
        given = F.linear(states, linear.weight, linear.bias)
        if self._listener is not None:
            self._listener(place, given)
        return given


class _Known(torch.autograd.Function):
    """An output that is known, with the gradient that the product would have sent to its input."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, copies: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return output.clone() if copies else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        # Nothing flows through the padding of a batch. To ask another device for it would be to wait for that device.
        # (`any` over rows takes some three times as long, and as long as the product of a few.)
        live = rows.abs().amax(1) != 0 if rows.device.type == "cpu" else None
        if live is None or bool(live.all()):
            by_states = input_gradient(rows, weight)
        else:
            by_states = rows.new_zeros(len(rows), weight.shape[1])
            by_states[live] = input_gradient(rows[live], weight)
        return by_states.view(*gradient.shape[:-1], -1), None, None, None


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


_live: ContextVar[slice] = ContextVar("live", default=slice(0))
"""The places of keys before those of the queries that have a gradient."""


class Attentions:
    """The attention modules of a copy that take the library's own "sdpa"; others are left as they are."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        AttentionInterface.register(_NAME, attend)
        self.used = True
        self._replayed = Reconfigured((module for layer in layers for module in layer.modules()), _NAME)

    @contextmanager
    def replaying(self, live: slice | None = None) -> Iterator[None]:
        """For the time of a block, positions with a graph attend as described above (unless `used` was cleared).

        Of the keys and values before theirs, those at the `live` places have a gradient.
        """
        before = _live.set(live or slice(0))
        try:
            with self._replayed.attending() if self.used else nullcontext():
                yield
        finally:
            _live.reset(before)


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
    recorded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if plain or not recorded or query.device.type != "cpu":
        plain = ALL_ATTENTION_FUNCTIONS[PLAIN]
        return plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Any = _FewQueries.apply(query.to(precise_dtype(query)) * scale, key, value, attention_mask)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


class _FewQueries(torch.autograd.Function):
    """softmax(Q K^T + mask) V, differentiated by the queries and by the last n keys and values alone.

    The queries are the last n positions of the N; everything before them is a cache, of which a stretch may be `live`.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        ctx.save_for_backward(query, key, value, mask)
        ctx.live = _live.get()
        heads = _Heads(query, key, value, mask)
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for part in heads.parts():
            output[:, :, part] = heads.apart(torch.bmm(heads.weights(part), heads.values))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (query, key, value, mask), (gradient,) = ctx.saved_tensors, gradients
        heads = _Heads(query, key, value, mask)
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        places = [slice(-query.shape[2], None), *([ctx.live] if ctx.live.stop else [])]
        found = [
            (place, torch.zeros_like(heads.keys[:, place]), torch.zeros_like(heads.values[:, place]))
            for place in places
        ]
        for part in heads.parts():
            weights, arriving = heads.weights(part), heads.together(gradient[:, :, part])
            for place, _, new_values in found:
                new_values.baddbmm_(weights[:, :, place].transpose(1, 2), arriving)
            by_weights = torch.bmm(arriving, heads.values.transpose(1, 2)).mul_(weights)
            by_scores = by_weights.addcmul_(weights, by_weights.sum(-1, keepdim=True), value=-1)
            by_query[:, :, part] = heads.apart(torch.bmm(by_scores, heads.keys))
            for place, new_keys, _ in found:
                new_keys.baddbmm_(by_scores[:, :, place].transpose(1, 2), heads.together(query[:, :, part]))
        for place, new_keys, new_values in found:
            by_key[:, :, place] = new_keys.unflatten(0, key.shape[:2])
            by_value[:, :, place] = new_values.unflatten(0, value.shape[:2])
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
