"""From examples to batches, a fixed number of tokens a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from research.pocket.corpus import Example
from research.pocket.tokenizer import END, render

LONGEST = 400  # tokens of one example; longer ones are left out
MICRO = 2048  # padded tokens worked on at once: small enough for the processor's caches
STRETCH = 1.25  # examples in one batch differ in length by at most this much: padding is work too


class Item(NamedTuple):
    """An example as tokens: its prompt, and its answer with the end of the turn."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer) - 1


class Batch(NamedTuple):
    """Token ids, padded on the right, and the next token where that counts (elsewhere -100): (rows, T)."""

    ids: Tensor
    targets: Tensor


def items(tokenizer: Tokenizer, examples: Iterable[Example]) -> Iterator[Item]:
    for messages, answer in examples:
        item = Item(tokenizer.encode(render(messages)).ids, tokenizer.encode(answer + END).ids)
        if len(item) <= LONGEST:
            yield item


def step_items(stream: Iterator[Item], tokens: int) -> list[Item]:
    """Enough for one step, shortest first. Takes no item that it does not use, so that a run can be resumed."""
    taken, total = [], 0
    while total < tokens:
        taken.append(next(stream))
        total += len(taken[-1])
    return sorted(taken, key=len)


def micro_batches(taken: list[Item]) -> Iterator[Batch]:
    """Neighbours in length together, at most `MICRO` padded tokens each."""
    current: list[Item] = []
    for item in taken:
        if current and (len(item) * (len(current) + 1) > MICRO or len(item) > STRETCH * len(current[0])):
            yield collate(current)
            current = []
        current.append(item)
    if current:
        yield collate(current)


def collate(current: list[Item]) -> Batch:
    rows, length = len(current), max(map(len, current))
    ids, targets = torch.zeros(rows, length, dtype=torch.long), torch.full((rows, length), -100)
    for row, (prompt, answer) in enumerate(current):
        ids[row, : len(prompt) + len(answer) - 1] = torch.tensor(prompt + answer[:-1])
        targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return Batch(ids, targets)


def logits(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (n, V) wherever something counts, and the right next tokens, (n,).

    The padding is on the right, where no token that counts can see it: no mask is needed.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    counted = batch.targets >= 0
    return model.lm_head(hidden[counted]), batch.targets[counted]


def loss(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, int]:
    """The *sum* of the answers' cross-entropies, and how many of their tokens are predicted right."""
    found, wanted = logits(model, batch)
    right = int((found.detach().argmax(-1) == wanted).sum())
    return F.cross_entropy(found, wanted, reduction="sum"), right


@torch.no_grad()
def exact(model: LlamaForCausalLM, probe: list[Item]) -> tuple[int, int]:
    """How many answers greedy decoding would give word for word, and of how many."""
    right = 0
    for item in probe:
        found, wanted = logits(model, collate([item]))
        right += int((found.argmax(-1) == wanted).all())
    return right, len(probe)
