"""Batches hold the examples, logits are the library's for every example alone; Muon; learnable blocks move."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.batches import LONGEST, STRETCH, Item, collate, items, logits, loss, micro_batches, step_items
from research.pocket.corpus import Corpus, Example
from research.pocket.muon import orthogonal
from research.pocket.optimizers import Optimizers
from research.pocket.reader.memory import free
from research.pocket.reader.network import Reader
from research.pocket.reader.places import sample
from research.pocket.reader.to_llama import to_llama
from research.pocket.tokenizer import END, render


def examples(count: int) -> list[Example]:
    stream = iter(Corpus(3, 10**6))
    return [next(stream) for _ in range(count)]


@pytest.fixture
def model(reader: Reader, tokenizer: Tokenizer) -> LlamaForCausalLM:
    return to_llama(reader, tokenizer)


@torch.no_grad()
def test_every_example_has_the_logits_it_has_alone(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    taken = list(items(tokenizer, examples(8)))
    assert len({len(item) for item in taken}) > 4  # padding must not leak
    found, wanted = logits(model, collate(taken))
    assert wanted.tolist() == [token for item in taken for token in item.answer]
    place = 0
    for prompt, answer in taken:
        alone = model(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(found[place : place + len(answer)], alone, rtol=1e-4, atol=1e-4)
        place += len(answer)


def test_the_loss_is_a_sum_over_the_answers_tokens(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    taken = list(items(tokenizer, examples(4)))
    whole, right = loss(model, collate(taken))
    losses = [loss(model, collate([item])) for item in taken]
    torch.testing.assert_close(whole, torch.stack([lost for lost, _ in losses]).sum(), rtol=1e-4, atol=0)
    assert right == sum(hits for _, hits in losses)


def test_items_are_the_prompt_and_the_answer_with_its_end(tokenizer: Tokenizer) -> None:
    made = examples(30)
    for (messages, answer), item in zip(made, items(tokenizer, made), strict=True):
        assert item == Item(tokenizer.encode(render(messages)).ids, tokenizer.encode(answer + END).ids)
    long = ([{"role": "user", "content": "word " * LONGEST}], "x")
    assert not list(items(tokenizer, [long]))


def test_steps_take_no_item_they_do_not_use(tokenizer: Tokenizer) -> None:
    stream = items(tokenizer, examples(200))
    taken = step_items(stream, 1500)
    lengths = [len(item) for item in taken]
    assert lengths == sorted(lengths)
    assert 1500 <= sum(lengths) < 1500 + LONGEST
    batches = list(micro_batches(taken))
    assert sum(len(b.ids) for b in batches) == len(taken)
    assert [t for b in batches for t in b.targets[b.targets >= 0].tolist()] == [t for i in taken for t in i.answer]
    assert all(b.ids.shape[1] <= STRETCH * (b.ids != 0).sum(1).min() for b in batches)


def test_what_may_be_learnt_moves_and_nothing_else(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    blocks = free(model, sample(tokenizer))
    optimizers = Optimizers(model, blocks)
    for _ in range(2):
        lost, _ = loss(model, collate(list(items(tokenizer, examples(12)))))
        lost.backward()
        optimizers.step(1e-2)
    for name, weight in model.named_parameters():
        moved = weight.detach() - before[name]
        if name in blocks:
            torch.testing.assert_close(blocks[name](moved), moved, rtol=0, atol=1e-5)
            assert (moved != 0).sum() > 0.6 * blocks[name].rows.sum() * blocks[name].columns.sum()
        else:
            assert not moved.any()


@pytest.mark.parametrize("shape", [(8, 8), (4, 12)])
def test_muon_makes_singular_values_equal(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(stack, steps=8))
    assert values.min() > 0.5
    assert values.max() < 1.5
