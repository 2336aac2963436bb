"""A Llama that a reader was written into reads as the reader does, before any training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.reader import places
from research.pocket.reader.codes import SIGNS, SIZE, codes
from research.pocket.reader.layout import HEAD, LAYERS, WIDTH, heads
from research.pocket.reader.network import Reader
from research.pocket.reader.places import BEGINNING, FLAG, OWN, PREVIOUS, special
from research.pocket.reader.questions import Questions
from research.pocket.reader.to_llama import rounded


def prompts_of(questions: Questions) -> list[tuple[int, int, int]]:
    """Row, length and the place of the mark."""
    lengths, marks = questions.valid.sum(1).tolist(), questions.after_mark.argmax(1).tolist()
    return [(row, lengths[row], marks[row]) for row in range(len(lengths))]


@torch.no_grad()
def test_every_layers_states_are_nearly_the_readers(
    llama: LlamaForCausalLM, trained: Reader, questions: Questions
) -> None:
    x, flag = trained.embed(questions.ids), torch.zeros(1, 1, WIDTH)
    flag[..., 1:] = trained.flag
    states = [x]
    for number, layer in enumerate(trained.layers):
        x, _ = layer(x, questions, None if number else flag * questions.after_mark[..., None])
        states.append(x)
    for row, length, _ in prompts_of(questions)[:4]:
        hidden = llama(questions.ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        assert hidden is not None
        for ours, theirs in zip(states, hidden, strict=False):
            apart = (ours[row, :length] - theirs[0, :, :WIDTH]).norm(dim=1) / ours[row, :length].norm(dim=1)
            assert apart[3:].median() < 0.08


@torch.no_grad()
def test_heads_look_where_they_were_told_to(llama: LlamaForCausalLM, trained: Reader, questions: Questions) -> None:
    _, back = trained.states(questions)
    matches = 0
    for row, length, mark in prompts_of(questions)[:6]:
        attention = llama(questions.ids[row : row + 1, :length], output_attentions=True).attentions
        assert attention is not None
        for number, layer in enumerate(LAYERS):
            for i, head in enumerate(heads(layer)):
                weights = attention[number][0, i]
                if head.kind == "before" and number == 0:
                    assert weights.diagonal(-head.reach).min() > 0.99
                if head.kind == "question":
                    turns = questions.ids[row, :length] == questions.ids[row, 0]  # a turn's first token has no flag
                    weights = weights.masked_fill(turns, 0)
                    assert weights[mark:, mark:].max() < 1e-6
                if head.kind == "same":
                    same = questions.same[row, :length, :length]
                    word = (same.sum(-1) > 0) & (questions.ids[row, :length] != questions.ids[row, mark])
                    assert (weights - same)[word].abs().sum(-1).median() < 0.1
                    nothing = (same.sum(-1) == 0).nonzero()[mark + 2 :, 0]
                    assert weights[nothing][:, 1:mark].sum(-1).median() < 0.1
                    matches += int(word.sum())
        pointed = attention[len(LAYERS) - 1][0, 3, mark + 1 :, mark + 1 :]
        assert (pointed - back[row, mark + 1 : length, mark + 1 : length]).abs().sum(-1).median() < 0.3
    assert matches > 30


@torch.no_grad()
def test_codes_and_flags_stand_where_they_should(
    llama: LlamaForCausalLM, tokenizer: Tokenizer, questions: Questions
) -> None:
    table, silent = codes(tokenizer), set(special(tokenizer).silent)
    row, length, mark = prompts_of(questions)[0]
    ids = questions.ids[row, :length]
    hidden = llama(ids[None], output_hidden_states=True).hidden_states
    assert hidden is not None
    for place in range(3, length):
        for at, token in ((OWN, ids[place].item()), (PREVIOUS, ids[place - 1].item())):
            kept = hidden[len(LAYERS)][0, place, at : at + SIGNS]
            if token in silent:
                assert kept.abs().max() < 0.1
            else:
                assert torch.equal(kept.sign(), table[token, :SIGNS])
    flags = hidden[1][0, :, FLAG]
    assert flags[:mark].abs().max() < 0.01 * flags[mark]
    assert flags[mark:].median() > 0.9 * flags[mark]
    begun = hidden[len(LAYERS)][0, :mark, BEGINNING : BEGINNING + SIGNS].abs().max()
    assert begun < 0.01 * hidden[len(LAYERS)][0, mark + 1 :, BEGINNING : BEGINNING + SIGNS].abs().max()


@torch.no_grad()
def test_the_first_token_is_the_readers_and_the_next_ones_follow_in_the_passage(
    llama: LlamaForCausalLM, trained: Reader, questions: Questions
) -> None:
    begins = trained(questions).begins.argmax(-1)
    agreed = followed = following = 0
    for row, length, _ in prompts_of(questions):
        ids = questions.ids[row, :length]
        answer = ids[questions.first[row] : questions.last[row] + 1]
        written = llama(torch.cat([ids, answer])[None]).logits[0, length - 1 :].argmax(-1)
        agreed += int(written[0] == ids[begins[row]])
        for place in range(1, len(answer)):
            once = int((ids[:length] == answer[place - 1]).sum()) == 1
            followed += once and bool(written[place] in (answer[place], 2))
            following += once
    assert agreed >= 0.7 * len(questions.ids)
    assert following > 10
    assert followed >= 0.6 * following


def test_it_is_a_plain_llama(llama: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    assert type(llama) is LlamaForCausalLM
    assert llama.config.hidden_size == places.HIDDEN
    assert llama.config.num_hidden_layers == places.LAST + 1
    assert not llama.config.tie_word_embeddings
    assert all(torch.isfinite(p).all() for p in llama.parameters())


@torch.no_grad()
def test_rounding_keeps_what_must_cancel(llama: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    half = rounded(llama, tokenizer)
    for (name, weight), kept in zip(half.named_parameters(), llama.parameters(), strict=True):
        assert torch.equal(weight, weight.bfloat16().float()), name
        assert (weight != kept.bfloat16().float()).sum() <= 2, name
    plainly = copy.deepcopy(llama)
    for weight in plainly.parameters():
        weight.copy_(weight.bfloat16())

    def ended(model: LlamaForCausalLM) -> float:
        """The first token's value for the answer's end, read by a head that finds nothing to copy."""
        attention: Any = model.model.layers[places.LAST].self_attn
        sink = places.seen(model, places.sample(tokenizer), places.LAST).sink
        return abs(float(attention.v_proj.weight[HEAD + SIZE] @ sink))

    assert ended(half) < 1e-3
    assert ended(plainly) > 10 * ended(half)
