"""Questions about passages as the reader sees them: the question first, then the passage, in a chat's turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from research.pocket.frames import Reading
from research.pocket.reading import READING_SHAPE
from research.pocket.tokenizer import render

MARK = "Context"  # the passage follows
ARTICLE = re.compile(r"^(a|an|the) ", re.IGNORECASE)
LONGEST = 260  # tokens of a prompt


class Prompt(NamedTuple):
    """One question's prompt, the place of the passage's mark, and the answer's first and last token."""

    ids: list[int]
    mark: int
    first: int
    last: int


class Questions(NamedTuple):
    """Prompts padded to one length T.

    ids, valid, after_mark (0 or 1): (rows, T). seen, seen_question: which places each place sees. same: (rows, T, T),
    even weights on the question's tokens that are the same word. first, last: (rows,).
    """

    ids: Tensor
    valid: Tensor
    after_mark: Tensor
    seen: Tensor
    seen_question: Tensor
    same: Tensor
    first: Tensor
    last: Tensor

    def answers(self) -> tuple[Tensor, Tensor]:
        """(rows, T): from the answer's first token to the one after its last; that one alone."""
        places = torch.arange(self.ids.shape[1])[None]
        after = places == self.last[:, None] + 1
        return (places >= self.first[:, None]) & (places <= self.last[:, None] + 1), after


def bare(answer: str) -> str:
    """An answer without its article: the noun can be found again."""
    return ARTICLE.sub("", answer) or answer


def prompts(tokenizer: Tokenizer, reading: Reading) -> Iterator[Prompt]:
    """The questions whose answers are in the passage as whole tokens, and whose prompts are not too long."""
    for question, answer in reading.questions:
        text = render(READING_SHAPE.messages(reading.passage, question))
        encoded = tokenizer.encode(text)
        mark, passage = text.index(f"\n{MARK}:") + 1, text.index(reading.passage)
        begin = text.find(answer, passage)
        begin, answer = begin + len(answer) - len(bare(answer)), bare(answer)
        if begin < passage or len(encoded.ids) > LONGEST:
            continue
        spans = [(i, a, b) for i, (a, b) in enumerate(encoded.offsets) if text[a:b].strip()]
        inside = [i for i, a, b in spans if b > begin and a < begin + len(answer)]
        if inside:
            place = next(i for i, a, b in spans if b > mark)
            yield Prompt(encoded.ids, place, inside[0], inside[-1])


def collate(chosen: list[Prompt], words: Tensor, *, unmatched: frozenset[int] = frozenset()) -> Questions:
    """`words`: each token's word number. `unmatched`: tokens that no head takes for words of the question."""
    rows, length = len(chosen), max(len(prompt.ids) for prompt in chosen)
    ids = torch.zeros(rows, length, dtype=torch.long)
    valid = torch.zeros(rows, length, dtype=torch.bool)
    marks = torch.tensor([prompt.mark for prompt in chosen])[:, None]
    for row, prompt in enumerate(chosen):
        ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
        valid[row, : len(prompt.ids)] = True
    places = torch.arange(length)[None]
    after, question = (places >= marks) & valid, places < marks
    matched = question & ~torch.isin(ids, torch.tensor(sorted(unmatched), dtype=torch.long))
    before = torch.ones(length, length, dtype=torch.bool).tril()[None]
    seen = (before & valid[:, None]) | torch.eye(length, dtype=torch.bool)
    numbers = words[ids]
    same = ((numbers[:, :, None] == numbers[:, None]) & matched[:, None] & after[:, :, None]).float()
    return Questions(
        ids,
        valid,
        after.float(),
        seen,
        before & question[:, None],
        same / same.sum(-1, keepdim=True).clamp_min(1),
        torch.tensor([prompt.first for prompt in chosen]),
        torch.tensor([prompt.last for prompt in chosen]),
    )
