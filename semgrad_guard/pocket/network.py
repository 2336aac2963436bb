"""The Llama forward pass again, for training only: fewer passes over memory than the library's modules, same numbers.

It works on the parameters of a `LlamaForCausalLM` (so that what is trained is what is saved) and differs from the
library's forward in four ways. Projections that read the same input are one product. Norms carry no scale: theirs
stays at one. A batch holds *trees*: one shared prefix (a passage) with several branches (its questions), each of
which sees the prefix and itself, at the positions it would have alone; so a passage is paid for once. And only the
answers' positions are computed in the last layer and the head. `tests/pocket/test_network.py` holds it to the
library's logits.

What an answer copies stands in the passage, so two heads of the last layer are told directly to look there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

POINTERS = 2  # heads of the last layer that are shown where an answer stands


class Batch(NamedTuple):
    """Token ids, positions and branches, (rows, T); where to predict and what, (rows, S).

    Branch 0 is the prefix, -1 is padding. `chosen` holds the positions whose next token counts, `targets` that token
    (-100 where a row has fewer). `sources`, (rows, S, places), says where in the prefix that token can be copied from
    (-1 for no place); None where nobody asks.
    """

    ids: Tensor
    positions: Tensor
    branches: Tensor
    chosen: Tensor
    targets: Tensor
    sources: Tensor | None = None


class _Norm(torch.autograd.Function):
    """x / rms(x), remembering its output instead of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        y, inverse = ctx.saved_tensors
        share = (grad * y).sum(-1, keepdim=True).div_(-y.shape[-1])
        return torch.addcmul(grad, y, share).mul_(inverse), None


class _Gate(torch.autograd.Function):
    """silu(gate) * up on the concatenated projection."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        ctx.save_for_backward(both)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        first, second = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=second)
        first.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


class _Rotate(torch.autograd.Function):
    """Rotary positions; the gradient is the rotation backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    out = torch.empty_like(x)
    half = one.shape[-1]
    torch.mul(one, cos, out=out[..., :half]).addcmul_(two, sin, value=-1)
    torch.mul(two, cos, out=out[..., half:]).addcmul_(one, sin)
    return out


def visible(branches: Tensor) -> Tensor:
    """(rows, T, T): which positions each position sees."""
    length = branches.shape[1]
    before = torch.ones(length, length, dtype=torch.bool).tril_()
    keys, queries = branches[:, None, :], branches[:, :, None]
    return before & ((keys == 0) | (keys == queries))


def _angles(model: LlamaForCausalLM, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, (rows, T, 1, half a head)."""
    config: Any = model.config
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    inverse = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size))
    angles = positions[..., None, None].float() * inverse
    return angles.cos(), angles.sin()


def logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The logits (rows, S, V) at the chosen positions."""
    return _forward(model, batch)[0]


def _forward(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits at the chosen positions, and how far the pointing heads are from where their answers stand."""
    config: Any = model.config
    rows, length = batch.ids.shape
    heads, groups, size, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    cos, sin = _angles(model, batch.positions)
    mask = visible(batch.branches)
    row = torch.arange(rows)[:, None]
    hidden = F.embedding(batch.ids, model.model.embed_tokens.weight)
    layers: list[Any] = list(model.model.layers)
    astray = hidden.new_zeros(())
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = _Norm.apply(hidden, eps)
        if layer is layers[-1]:  # from here on only the answers count; the others still give keys and values
            both = F.linear(normed, torch.cat([attention.k_proj.weight, attention.v_proj.weight]))
            keys, values = both.view(rows, length, 2, groups, size).unbind(2)
            hidden, mask = hidden[row, batch.chosen], mask[row, batch.chosen]
            queries = F.linear(normed[row, batch.chosen], attention.q_proj.weight).view(rows, -1, heads, size)
            queries = _Rotate.apply(queries, cos[row, batch.chosen], sin[row, batch.chosen])
            keys = _Rotate.apply(keys, cos, sin)
            if batch.sources is not None:
                shared = torch.arange(POINTERS) * groups // heads
                astray = _astray(queries[:, :, :POINTERS], keys[:, :, shared], mask, batch.sources)
        else:
            weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            all_heads = F.linear(normed, weight).view(rows, length, heads + 2 * groups, size)
            rotated = _Rotate.apply(all_heads[:, :, : heads + groups], cos, sin)
            queries, keys, values = rotated[:, :, :heads], rotated[:, :, heads:], all_heads[:, :, heads + groups :]
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask[:, None],
            enable_gqa=heads != groups,
        )
        mixed = mixed.transpose(1, 2).reshape(rows, -1, heads * size)
        hidden = hidden + F.linear(mixed, attention.o_proj.weight)
        weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        hidden = hidden + F.linear(_Gate.apply(F.linear(_Norm.apply(hidden, eps), weight)), mlp.down_proj.weight)
    return F.linear(_Norm.apply(hidden, eps), model.lm_head.weight), astray


def _astray(queries: Tensor, keys: Tensor, mask: Tensor, sources: Tensor) -> Tensor:
    """Sum of -log(attention on the sources), mean over heads. Queries (rows, S, heads, size), keys (rows, T, ...)."""
    weights = torch.einsum("rshd,rthd->rhst", queries, keys) / queries.shape[-1] ** 0.5
    found = weights.masked_fill(~mask[:, None], float("-inf")).log_softmax(-1)
    places = sources.clamp_min(0)[:, None].expand(-1, found.shape[1], -1, -1)
    each = found.gather(-1, places).masked_fill(sources[:, None] < 0, float("-inf"))
    known = (sources >= 0).any(-1)[:, None].expand(-1, found.shape[1], -1)
    return -each[known].logsumexp(-1).sum() / found.shape[1]


def loss(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """*Sums* over the answers' tokens: cross-entropies, how far pointing heads are astray, and how many are right."""
    out, astray = _forward(model, batch)
    out, targets = out.flatten(0, 1), batch.targets.flatten()
    right = (out.detach().argmax(-1) == targets).sum()
    return F.cross_entropy(out, targets, ignore_index=-100, reduction="sum"), astray, right
