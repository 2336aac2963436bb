"""The layers in which the Llama learns facts, so that reading stays as it was written, whatever they learn.

They read and write the reader's part of the stream alone. Wherever a passage comes before, and in a turn's first
token (the sink of many heads), their units are silent and their heads look at the very first token, which brings
nothing. Where no passage comes before (in the question), the heads that point and copy never look
at; and they write nothing in the few directions by which these heads tell where an answer begins and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from research.pocket.reader.circuits import AttentionHead
from research.pocket.reader.layout import HEAD, WIDTH
from research.pocket.reader.places import FACTS, FLAG, HEADS, HIDDEN, LAST, SINK, Sample, seen

LEARNING = {FACTS: range(HEADS), LAST: range(2, HEADS)}  # by layer: the heads that learn
CLOSED = 4000.0  # a score against which nothing that is learnt weighs anything
NOISE = 0.02  # to begin with


@dataclass(frozen=True, slots=True)
class Free:
    """The learnable block of a weight (rows, columns), but for some directions.

    unwritten: (rows, n), unread: (columns, n), orthonormal. Muon, which makes a whole gradient orthogonal, stays in
    the block and off the directions.
    """

    rows: Tensor
    columns: Tensor
    unwritten: Tensor | None = None
    unread: Tensor | None = None

    def __call__(self, change: Tensor) -> Tensor:
        change = change * self.rows[:, None] * self.columns
        if self.unwritten is not None:
            change = change - self.unwritten @ (self.unwritten.mT @ change)
        if self.unread is not None:
            change = change - (change @ self.unread) @ self.unread.mT
        return change


def close(model: LlamaForCausalLM, number: int, measured: Sample) -> None:
    """Make a layer's learning heads and its units silent wherever a passage comes before, and in sinks."""
    layer: Any = model.model.layers[number]
    now = seen(model, measured, number)
    for i in LEARNING[number]:
        AttentionHead(layer.self_attn, i, now).keep_out_of_passages(CLOSED)
    layer.mlp.gate_proj.weight[:, FLAG] = -CLOSED / now.states[-1, FLAG]
    layer.mlp.gate_proj.weight[:, SINK] = -CLOSED / now.sink[SINK]


@torch.no_grad()
def begin(model: LlamaForCausalLM, measured: Sample, seed: int) -> None:
    """Give the learnable blocks a little noise to begin with, and gradients to them alone."""
    generator = torch.Generator().manual_seed(seed)
    blocks = free(model, measured)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in blocks)
        if name in blocks:
            weight += blocks[name](NOISE * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def free(model: LlamaForCausalLM, measured: Sample) -> dict[str, Free]:
    """By name of a weight, its learnable block; unnamed weights do not change."""
    part, written = _only(HIDDEN, range(WIDTH)), _only(HIDDEN, range(1, WIDTH))
    found = {"lm_head.weight": Free(torch.ones(model.config.vocab_size), part)}
    for number, learning in LEARNING.items():
        layer: Any = model.model.layers[number]
        unwritten = _looked_for(model) if number == FACTS else None
        sink = seen(model, measured, number).sink * part
        dimensions = [i * HEAD + d for i in learning for d in range(HEAD)]
        still = {i * HEAD + d for i in learning for d in (HEAD // 2 - 1, HEAD - 1)}
        brought = _only(HEADS * HEAD, dimensions)
        looking = Free(_only(HEADS * HEAD, [d for d in dimensions if d not in still]), part)
        units = torch.ones(layer.mlp.gate_proj.out_features)
        blocks = {
            "self_attn.q_proj": looking,
            "self_attn.k_proj": looking,
            "self_attn.v_proj": Free(brought, part, unread=(sink / sink.norm())[:, None]),
            "self_attn.o_proj": Free(written, brought, unwritten),
            "mlp.gate_proj": Free(units, part),
            "mlp.up_proj": Free(units, part),
            "mlp.down_proj": Free(written, units, unwritten),
        }
        found |= {f"model.layers.{number}.{name}.weight": block for name, block in blocks.items()}
    return found


def _looked_for(model: LlamaForCausalLM) -> Tensor:
    """(HIDDEN, n): the directions in which the last layer's circuits look at the reader's part, orthonormal."""
    attention: Any = model.model.layers[LAST].self_attn
    circuits = slice(0, LEARNING[LAST].start * HEAD)
    rows = torch.cat([attention.k_proj.weight[circuits], attention.v_proj.weight[circuits]])
    rows = rows * _only(HIDDEN, range(1, WIDTH))
    rows = rows[rows.norm(dim=1) > 0]
    directions, sizes, _ = torch.linalg.svd((rows / rows.norm(dim=1, keepdim=True)).mT, full_matrices=False)
    return directions[:, sizes > 1e-3]


def _only(size: int, chosen: Any) -> Tensor:
    mask = torch.zeros(size)
    mask[list(chosen)] = 1
    return mask
