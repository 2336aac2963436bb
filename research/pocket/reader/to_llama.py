"""Write a trained reader into a plain Llama: the learnt heads and MLPs as they are, the given ones by hand.

The Llama's stream holds the reader's (`places.py` lists the rest); its norm sees all of it, so every weight that read a
normed state is scaled by the reader's share of the whole. The last layer points at the answer, copies it
token by token, and ends it. The result answers by plain `generate` nearly as well as the reader; facts are learnt
in the training that follows (`pocket.train`), in layers of their own (`memory.py`).

Why: docs/decisions.md#0071
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.reader.circuits import AttentionHead
from research.pocket.reader.codes import SIGNS, SIZE, VARIANTS, codes
from research.pocket.reader.layout import HEAD, WIDTH
from research.pocket.reader.memory import LEARNING, begin, close
from research.pocket.reader.network import Layer, Reader
from research.pocket.reader.places import (
    BEGINNING,
    ENDED,
    FIRST,
    FLAG,
    HIDDEN,
    LAST,
    MARKED,
    OWN,
    PREVIOUS,
    SINK,
    Sample,
    empty_llama,
    residual,
    sample,
    seen,
    special,
)

SHARE = (WIDTH / HIDDEN) ** 0.5  # of a norm: the reader's share of the whole
QUIET = 0.08  # a code's loudness in the stream, of an embedding's: it must not disturb the norms
SHARPER = 2.0  # the reader's scores of places: two codes brought half and half spell out a third token
CODE_LOGIT = 14.0  # of a token whose code the last layer brings alone
READY = 1.2  # of the next token's logit: the end's where the reader is of two minds
GOING_ON = 2.5  # how much louder the next token is brought than the first
SURER = 1.2  # times `GOING_ON`: logits of the end for one of the reader's
GATE = 1000.0  # how much louder still: the last norm then leaves only an answer that is read
PREVIOUS_HEAD, FLAG_HEAD = 2, 3  # of the first layer
POINTING_HEAD, GOING_ON_HEAD = 0, 1  # of the last layer


@torch.no_grad()
def to_llama(reader: Reader, tokenizer: Tokenizer, *, seed: int = 0) -> LlamaForCausalLM:
    """A `LlamaForCausalLM` in float32 that reads as `reader` does: one-turn chats in the form of `READING_SHAPE`."""
    model = empty_llama(tokenizer.get_vocab_size())
    measured = sample(tokenizer)
    loudness = _embeddings(model, reader, tokenizer)
    layers: Any = model.model.layers
    for number, layer in enumerate(reader.layers):
        if isinstance(layer, Layer):
            _attention(model, number, layer, measured, loudness)
            _mlp(layers[number].mlp, layer)
        if number == 0:
            _first_layer(model, reader, measured, loudness)
    for number in LEARNING:
        close(model, number, measured)
    _last_layer(model, reader, tokenizer, measured, loudness)
    begin(model, measured, seed)
    return model


def _embeddings(model: LlamaForCausalLM, reader: Reader, tokenizer: Tokenizer) -> float:
    """The reader's, and every token's code next to it. Returns the loudness of an embedding."""
    weight, names = model.model.embed_tokens.weight, special(tokenizer)
    weight[:, :WIDTH] = reader.embed(torch.arange(len(weight)))
    loudness = weight[:, :WIDTH].pow(2).mean().sqrt().item()
    weight[:, OWN : OWN + SIZE] = QUIET * loudness * codes(tokenizer)
    weight[list(names.silent), OWN : OWN + SIZE] = 0
    weight[names.sink, SINK] = loudness
    weight[names.mark, MARKED] = loudness
    return loudness


def _attention(model: LlamaForCausalLM, number: int, layer: Layer, measured: Sample, loudness: float) -> None:
    attention: Any = model.model.layers[number].self_attn
    now = seen(model, measured, number)
    for i, kind in enumerate(layer.heads):
        head = AttentionHead(attention, i, now)
        head.clear()
        if kind.kind == "back":
            head.carry(OWN, BEGINNING, QUIET * loudness / now.code(OWN))
        else:
            rows = slice(i * HEAD, (i + 1) * HEAD)
            head.value[:, :WIDTH] = layer.value.weight[rows] * SHARE
            head.out[1:WIDTH] = layer.out.weight[:, rows]
        if i in layer.learnt:
            place = layer.learnt.index(i) * HEAD
            head.query[:, :WIDTH] = layer.query.weight[place : place + HEAD] * SHARE
            head.key[:, :WIDTH] = layer.key.weight[place : place + HEAD] * SHARE
        if kind.kind == "question":
            head.keep_to_the_question()
        elif kind.kind == "back":
            head.keep_to_the_passage()
        elif kind.kind == "same":
            head.look_for_the_same_word(QUIET * loudness)
            head.hush_the_sink()
        elif layer.fixed(kind):
            head.look_before(kind.reach)


def _mlp(mlp: Any, layer: Layer) -> None:
    gate, up = layer.gate_up.weight.chunk(2)
    for weight, learnt in ((mlp.gate_proj.weight, gate), (mlp.up_proj.weight, up)):
        weight.zero_()
        weight[:, :WIDTH] = learnt * SHARE
    mlp.down_proj.weight[1:WIDTH] = layer.down.weight


def _first_layer(model: LlamaForCausalLM, reader: Reader, measured: Sample, loudness: float) -> None:
    """Two heads more: the code of the token before, and the flag of tokens after the passage's mark."""
    attention: Any = model.model.layers[0].self_attn
    now = seen(model, measured, 0)
    previous, flag = (AttentionHead(attention, number, now) for number in (PREVIOUS_HEAD, FLAG_HEAD))
    for head in (previous, flag):
        head.clear()
    previous.look_before(1)
    previous.carry(OWN, PREVIOUS, QUIET * loudness / now.code(OWN))
    previous.value[SIZE, SINK] = 1 / now.sink[SINK]  # the first token has none before it and looks at itself
    previous.out[FIRST, SIZE] = loudness
    flag.look_for_the_mark()
    flag.out[FLAG, 0] = loudness
    flag.out[1:WIDTH, 0] = reader.flag


def _last_layer(
    model: LlamaForCausalLM, reader: Reader, tokenizer: Tokenizer, measured: Sample, loudness: float
) -> None:
    """Point, continue, end; and a head of the vocabulary that reads codes."""
    names = special(tokenizer)
    last: Any = model.model.layers[LAST]
    now = seen(model, measured, LAST)
    loud = now.loudness[-1].item()
    pointing, going_on = (AttentionHead(last.self_attn, i, now) for i in (POINTING_HEAD, GOING_ON_HEAD))
    for head in (pointing, going_on):
        head.clear()
    begins, over = SHARPER * SHARE * reader.begins.weight[0], SHARE * reader.over.weight[0]
    pointing.point(begins, GATE * loud)
    match = CODE_LOGIT * GOING_ON  # about the next token's logit
    ended = SURER * GOING_ON
    bias = reader.over.bias.item() + READY * match / ended
    going_on.go_on(begins, over, bias, GATE * GOING_ON * loud, QUIET * loudness)
    going_on.out[ENDED] *= 0.1 * GATE * loud
    final = residual(model, measured, LAST + 1)[-1]
    grown = now.states[-1, 0].item() / final[0].item()  # how much louder the last layer left the stream
    head = model.lm_head.weight
    head[:, OWN : OWN + SIZE] = codes(tokenizer) * CODE_LOGIT * grown / GATE / (SIGNS + 4 * VARIANTS)
    head[list(names.silent)] = 0
    head[names.end, ENDED] = ended * grown / 0.1 / GATE


@torch.no_grad()
def rounded(model: LlamaForCausalLM, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A copy with bfloat16 weights, in which the terms that must cancel cancel again.

    Where nothing is read nothing is loud, and the last norm makes as much more (`GATE`) of the sink's part about
    the answer's end: rounding alone would end answers in the middle of a word. Two columns hold the correction, the
    second the rest after the first's rounding.
    """
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    last: Any = model.model.layers[LAST]
    going_on = AttentionHead(last.self_attn, GOING_ON_HEAD, seen(model, sample(tokenizer), LAST))
    for column in (SINK, FIRST):
        going_on.hush_the_sink(column)
        going_on.value.copy_(going_on.value.bfloat16())
    return model
