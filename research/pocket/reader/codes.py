"""A code for every token: signs drawn at random, by which a head knows a word again and an answer is spelled out.

Tokens that are one word but for capitals and the space before it share their first signs.
"""

from __future__ import annotations

from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

from research.pocket.word_vectors import SPACE

NEWLINE = "Ċ"  # how byte-level BPE writes one
SIGNS, VARIANTS = 22, 3
SIZE = SIGNS + VARIANTS
MATCHED = 22  # dimensions of a code that a head compares (its pairs that hardly turn hold no more)
ALIKE = (MATCHED - VARIANTS - 4, SIGNS - 6)  # products of two words' signs, at most: two and three of them differ
THE_WORD = torch.arange(MATCHED)
THE_TOKEN = torch.cat([torch.arange(MATCHED - VARIANTS), torch.arange(SIGNS, SIZE)])


def token_names(tokenizer: Tokenizer) -> list[str]:
    """By token id."""
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    return [names[i] for i in range(len(names))]


def newlines(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens with a line break in them: no words, whatever is around it."""
    return [i for i, name in enumerate(token_names(tokenizer)) if NEWLINE in name]


def word_numbers(tokenizer: Tokenizer) -> Tensor:
    """(V,): the same number for tokens that are the same word."""
    seen: dict[str, int] = {}
    names = token_names(tokenizer)
    return torch.tensor([seen.setdefault(_bare(name).lower() or name, len(seen)) for name in names])


def codes(tokenizer: Tokenizer, seed: int = 7) -> Tensor:
    """(V, `SIZE`): signs of the word, +-1, then space, capital, and all capitals, +-2."""
    numbers = word_numbers(tokenizer)
    signs = _signs(int(numbers.max()) + 1, seed)
    names = token_names(tokenizer)
    variants = [[SPACE in n, _bare(n)[:1].isupper(), len(_bare(n)) > 1 and _bare(n).isupper()] for n in names]
    return torch.cat([signs[numbers], 4.0 * torch.tensor(variants).float() - 2.0], 1)


@cache
def _signs(words: int, seed: int) -> Tensor:
    """(words, `SIGNS`): drawn one after the other, but for those too much `ALIKE` one before."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.where(torch.rand(2 * words, SIGNS, generator=generator) < 0.5, 1.0, -1.0)
    found, count = torch.zeros(words, SIGNS), 0
    for candidate in drawn[:, :, None]:
        alike = [found[:count, :size] @ candidate[:size] for size in (MATCHED - VARIANTS, SIGNS)]
        if count < words and (alike[0] <= ALIKE[0]).all() and (alike[1] <= ALIKE[1]).all():
            found[count], count = candidate[:, 0], count + 1
    if count < words:
        raise ValueError(f"codes of {SIGNS} signs keep {count} words apart, not {words}")
    return found


def _bare(token: str) -> str:
    return token.replace(SPACE, "")
