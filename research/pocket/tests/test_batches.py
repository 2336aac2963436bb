"""Batches hold the examples, and an example's logits in a batch are those that it has alone."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.batches import LONGEST, STRETCH, Item, collate, items, logits, loss, micro_batches, step_items
from research.pocket.corpus import Corpus, Example
from research.pocket.tokenizer import END, render


@pytest.fixture
def examples() -> list[Example]:
    return list(islice(Corpus(3, 10**6), 200))


@torch.no_grad()
def test_every_example_has_the_logits_and_the_loss_it_has_alone(
    llama: LlamaForCausalLM, tokenizer: Tokenizer, examples: list[Example]
) -> None:
    taken = list(items(tokenizer, examples[:8]))
    assert len({len(item) for item in taken}) > 4  # padding must not leak
    found, wanted = logits(llama, collate(taken))
    assert wanted.tolist() == [token for item in taken for token in item.answer]
    place = 0
    for prompt, answer in taken:
        alone = llama(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(found[place : place + len(answer)], alone, rtol=1e-4, atol=1e-4)
        place += len(answer)
    whole, right = loss(llama, collate(taken))
    losses = [loss(llama, collate([item])) for item in taken]
    torch.testing.assert_close(whole, torch.stack([lost for lost, _ in losses]).sum(), rtol=1e-4, atol=0)
    assert right == sum(hits for _, hits in losses)


def test_items_are_the_prompt_and_the_answer_with_its_end(tokenizer: Tokenizer, examples: list[Example]) -> None:
    for (messages, answer), item in zip(examples, items(tokenizer, examples), strict=True):
        assert item == Item(tokenizer.encode(render(messages)).ids, tokenizer.encode(answer + END).ids)
    long = ([{"role": "user", "content": "word " * LONGEST}], "x")
    assert not list(items(tokenizer, [long]))


def test_steps_take_no_item_they_do_not_use(tokenizer: Tokenizer, examples: list[Example]) -> None:
    taken = step_items(items(tokenizer, examples), 1500)
    lengths = [len(item) for item in taken]
    assert lengths == sorted(lengths)
    assert 1500 <= sum(lengths) < 1500 + LONGEST
    batches = list(micro_batches(taken))
    assert [t for b in batches for t in b.targets[b.targets >= 0].tolist()] == [t for i in taken for t in i.answer]
    assert all(b.ids.shape[1] <= STRETCH * (b.ids != 0).sum(1).min() for b in batches)
