"""The first weights: random, but for a circuit that copies.

Before a small model can read it must discover copying: one layer that tells each position which token came before it,
and a next one that looks for an earlier place after the same token and brings what stood there ("induction heads",
Olsson et al. 2022). From random weights that discovery takes most of an hour of one core. It is four projections, so
here they are set by hand; training starts from there, changes them freely, and spends its time on reading.

The residual stream is divided in two: dimension 0 is a constant and 1..d/2-1 hold the token (the embedding); the
upper half receives the previous token in layer 0, then what layer 1 found. The head reads the upper half with the
embedding's own vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CONSTANT, SPREAD = 0.5, 0.1
MEANING = 0.5  # of an embedding's variance: the word vector's part; the rest tells words of like meaning apart
SHARP = 1.3  # how strongly layer 0 prefers the position just before
MATCH = 3.0  # how strongly layer 1 prefers the same token
GAIN = 6.0  # how loudly layer 1 says what it found
SLOW = 6  # rotary pairs from this one on turn so slowly that they hardly see the distance


class Place(NamedTuple):
    """Where one head works: its first key row, its first query row, its size, and where the upper half begins.

    The key rows are also the dimensions of the token that this head carries.
    """

    key: int
    query: int
    size: int
    half: int


@torch.no_grad()
def set_copying(model: LlamaForCausalLM, vectors: dict[int, Tensor] | None = None) -> None:
    """Overwrite embedding, head and the attention of layers 0 and 1 in place; all layers start by adding little."""
    config: Any = model.config
    layers: Any = model.model.layers
    width, size, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    half, share = width // 2, config.num_attention_heads // groups
    copying = half // size  # so many key-value heads together carry half the stream
    if copying * size != half or copying > groups:
        raise ValueError("the circuit needs key-value heads that are together half as wide as the model")
    for layer in layers:
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.mlp.down_proj.weight.mul_(0.3)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(SPREAD / 0.02)
    for token, vector in (vectors or {}).items():
        own = embedding[token, 1:half]
        own.copy_(MEANING**0.5 * SPREAD * vector + (1 - MEANING) ** 0.5 * own)
    embedding[:, half:] *= 0.05
    embedding[:, 0] = CONSTANT
    scale = (width / (half * SPREAD**2 + CONSTANT**2)) ** 0.5  # what the norm multiplies by
    head = model.lm_head.weight
    head.mul_(0.3)
    head[:, half + 1 :] += embedding[:, 1:half] * 0.4
    previous, search = layers[0].self_attn, layers[1].self_attn
    turn = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    for group in range(copying):
        place = Place(group * size, group * share * size, size, half)
        _previous_token(previous, place, turn, SHARP * 6.5 / (scale * CONSTANT))
        _carry(previous, place, 1 / scale)
        _same_token(search, place, MATCH)
        _carry(search, place, GAIN / scale)


def _previous_token(attention: Any, place: Place, turn: Tensor, strength: float) -> None:
    """Keys are a constant; queries the same constant turned back by one position."""
    key, query, size, pairs = place.key, place.query, place.size, len(turn)
    attention.k_proj.weight[key : key + size] *= 0.1
    attention.q_proj.weight[query : query + size] *= 0.1
    attention.k_proj.weight[key : key + pairs, 0] = strength
    attention.q_proj.weight[query : query + pairs, 0] = strength * torch.cos(-turn)
    attention.q_proj.weight[query + pairs : query + size, 0] = strength * torch.sin(-turn)


def _same_token(attention: Any, place: Place, strength: float) -> None:
    """Keys show the previous token, queries the present one, through the slow rotary pairs."""
    key, query, size = place.key, place.query, place.size
    slow = torch.tensor([i for i in range(size) if i % (size // 2) >= SLOW])
    attention.k_proj.weight[key : key + size] *= 0.1
    attention.q_proj.weight[query : query + size] *= 0.1
    attention.k_proj.weight[key + slow, place.half + key + slow] += strength
    attention.q_proj.weight[query + slow, key + slow] += strength


def _carry(attention: Any, place: Place, gain: float) -> None:
    """Values are the token's own dimensions; they arrive in the upper half."""
    every = torch.arange(place.size)
    attention.v_proj.weight[place.key : place.key + place.size] *= 0.1
    attention.v_proj.weight[place.key + every, place.key + every] += 1.0
    attention.o_proj.weight[place.half + place.key + every, place.query + every] += gain
