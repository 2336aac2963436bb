"""The Llama that the reader is written into reads at once, and as well whatever is learnt in its last layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.optimizers import orthogonal
from research.pocket.reader import places
from research.pocket.reader.codes import SIZE
from research.pocket.reader.layout import HEAD, LAYERS, WIDTH
from research.pocket.reader.memory import Free, free
from research.pocket.reader.places import FLAG, HIDDEN, OWN, sample
from research.pocket.reader.to_llama import rounded
from research.pocket.tokenizer import render

READING = Path("research/questions/reading.jsonl")
WITHOUT_A_PASSAGE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def blocks(llama: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, Free]:
    return free(llama, sample(tokenizer))


@pytest.fixture(scope="module")
def changed(llama: LlamaForCausalLM, blocks: dict[str, Free]) -> LlamaForCausalLM:
    """Everything learnable is as large as after a training, and random."""
    model = copy.deepcopy(llama)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in blocks:
                weight += blocks[name](0.3 * torch.randn(weight.shape, generator=generator))
    return model


def answers(model: Any, tokenizer: Tokenizer) -> list[bool]:
    """Whether each of some questions about a passage is answered word for word."""
    rows = [json.loads(line) for line in READING.read_text(encoding="utf-8").splitlines()[:200:5]]
    right = []
    for row in rows:
        text = f"Question: {row['question']}\nContext: {row['context']}\nAnswer:"
        ids = torch.tensor([tokenizer.encode(render([{"role": "user", "content": text}])).ids])
        written = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        right.append(tokenizer.decode(written) in [answer.removeprefix("the ") for answer in row["answers"]])
    return right


def test_it_reads_and_still_does_after_anything_was_learnt(
    llama: LlamaForCausalLM, changed: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    before, after = answers(llama, tokenizer), answers(changed, tokenizer)
    assert sum(before) >= 0.7 * len(before)
    assert sum(one != two for one, two in zip(before, after, strict=True)) <= 1
    ids = torch.tensor([tokenizer.encode(render(WITHOUT_A_PASSAGE)).ids])
    assert (changed(ids).logits[0, -1] - llama(ids).logits[0, -1]).abs().max() > 10


def test_what_may_be_learnt_has_gradients_and_leaves_the_reader_alone(
    llama: LlamaForCausalLM, blocks: dict[str, Free]
) -> None:
    assert {name for name, p in llama.named_parameters() if p.requires_grad} == set(blocks)
    assert not any(f"layers.{number}." in name for name in blocks for number in range(len(LAYERS)))
    for name, block in blocks.items():
        change = block(torch.ones(len(block.rows), len(block.columns)))
        change = change if name.endswith(("o_proj.weight", "down_proj.weight")) else change.mT
        assert change[[OWN, FLAG, HIDDEN - 1]].abs().max() < 1e-5
        assert change[1:WIDTH].abs().max() > 0.1


def test_muon_stays_in_the_block_and_off_the_directions(blocks: dict[str, Free]) -> None:
    generator = torch.Generator().manual_seed(2)
    for block in blocks.values():
        if len(block.rows) > 1000:  # the head, which Muon does not train
            continue
        gradient = block(torch.randn(len(block.rows), len(block.columns), generator=generator))
        step = orthogonal(gradient[None])[0]
        torch.testing.assert_close(block(step), step, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12)])
def test_muon_makes_singular_values_equal(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(stack, steps=8))
    assert values.min() > 0.5
    assert values.max() < 1.5


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
