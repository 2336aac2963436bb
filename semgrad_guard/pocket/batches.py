"""From groups of examples to batches of trees, a fixed number of tokens a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from semgrad_guard.pocket.corpus import Group
from semgrad_guard.pocket.network import Batch
from semgrad_guard.pocket.tokenizer import END, render

LONGEST = 640  # tokens of one tree; longer ones lose questions, or are left out
MICRO = 2048  # padded tokens worked on at once: small enough for the processor's caches
PLACES = 3  # that an answer may stand at
STRETCH = 1.25  # trees in one batch differ in length by at most this much: padding is work too


@dataclass(frozen=True, slots=True)
class Tree:
    """One group as tokens. `answers[i]`: the places from which the i-th answer's tokens are predicted."""

    ids: list[int]
    positions: list[int]
    branches: list[int]
    answers: list[range]

    @property
    def predicted(self) -> int:
        return sum(len(a) for a in self.answers)


def tree(tokenizer: Tokenizer, group: Group) -> Tree | None:
    """Shared prefix first, then a branch for each example; None where even one question is too long."""
    prompts = [tokenizer.encode(render(messages)).ids for messages, _ in group]
    answers = [tokenizer.encode(answer + END).ids for _, answer in group]
    shared = _shared(prompts)
    ids, branches, positions = prompts[0][:shared], [0] * shared, list(range(shared))
    spans = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        own = prompt[shared:] + answer[:-1]
        if len(ids) + len(own) > LONGEST:
            break
        spans.append(range(len(ids) + len(own) - len(answer), len(ids) + len(own)))
        ids, branches = ids + own, branches + [number] * len(own)
        positions += range(shared, shared + len(own))
    return Tree(ids, positions, branches, spans) if spans else None


def _shared(prompts: list[list[int]]) -> int:
    """Length of the common beginning; every prompt keeps at least its last token for itself."""
    least = min(map(len, prompts)) - 1
    if len(prompts) == 1:
        return least
    return next((i for i in range(least) if len({p[i] for p in prompts}) > 1), least)


def targets(tokenizer: Tokenizer, group: Group, made: Tree) -> list[list[int]]:
    return [tokenizer.encode(answer + END).ids for _, answer in group[: len(made.answers)]]


Item = tuple[Tree, list[list[int]]]


def items(tokenizer: Tokenizer, groups: Iterable[Group]) -> Iterator[Item]:
    """Trees with their answers' tokens."""
    for group in groups:
        made = tree(tokenizer, group)
        if made is not None:
            yield made, targets(tokenizer, group, made)


def step_items(stream: Iterator[Item], tokens: int) -> list[Item]:
    """Enough trees for one step, shortest first. Takes no item that it does not use, so that a run can be resumed."""
    taken, total = [], 0
    while total < tokens:
        taken.append(next(stream))
        total += len(taken[-1][0].ids)
    return sorted(taken, key=lambda item: len(item[0].ids))


def micro_batches(taken: list[Item]) -> Iterator[Batch]:
    """Neighbours in length together, at most `MICRO` padded tokens each."""
    current: list[Item] = []
    for item in taken:
        length = len(item[0].ids)
        if current and (length * (len(current) + 1) > MICRO or length > STRETCH * len(current[0][0].ids)):
            yield collate(current)
            current = []
        current.append(item)
    if current:
        yield collate(current)


def collate(current: list[Item]) -> Batch:
    """Pad to the longest tree and to the most answer tokens."""
    trees = [made for made, _ in current]
    chosen = [[place for span in made.answers for place in span] for made in trees]
    wanted = [[token for answer in answers for token in answer] for _, answers in current]
    return Batch(
        _pad([t.ids for t in trees], 0),
        _pad([t.positions for t in trees], 0),
        _pad([t.branches for t in trees], -1),
        _pad(chosen, 0),
        _pad(wanted, -100),
        _sources(current),
    )


def _sources(current: list[Item]) -> Tensor:
    """Where each answer's tokens stand in the shared prefix: (rows, S, `PLACES`), -1 for nowhere."""
    found = [[place for answer in answers for place in _places(made, answer)] for made, answers in current]
    out = torch.full((len(found), max(map(len, found)), PLACES), -1, dtype=torch.long)
    for i, row in enumerate(found):
        out[i, : len(row)] = torch.tensor(row)
    return out


def _places(made: Tree, answer: list[int]) -> list[list[int]]:
    prefix = made.ids[: made.branches.count(0)]
    span = answer[:-1]
    starts = [i for i in range(len(prefix) - len(span) + 1) if prefix[i : i + len(span)] == span] if span else []
    starts = (starts + [-1] * PLACES)[:PLACES]
    within = [[start + j if start >= 0 else -1 for start in starts] for j in range(len(span))]
    return [*within, [-1] * PLACES]  # nothing to copy at the end


def _pad(rows: list[list[int]], value: int) -> Tensor:
    out = torch.full((len(rows), max(map(len, rows))), value, dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out
