"""The meaning of ordinary words, before training: published word vectors for the tokens that are whole words.

A few thousand paragraphs show a model how questions find their answers, but not that "warranty" and "guarantee" say
the same. So the embeddings of whole words are mixed from GloVe's 100-dimensional vectors of Wikipedia and Gigaword
(Pennington, Socher and Manning, 2014; Public Domain Dedication and License 1.0): an unseen word is near the seen ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

FILE = Path(__file__).parent / "data" / "word_vectors.safetensors"
LONGEST_NUMBER = 3  # digits of one token
SPACE = "Ġ"  # how byte-level BPE writes the space that every whole word begins with


def token_vectors(tokenizer: Tokenizer, size: int) -> dict[int, Tensor]:
    """By token id: a vector of `size` dimensions (at most 100), every dimension as loud as any other on average.

    The vectors' principal directions are evened out a little (by the square root of their singular values; GloVe's
    loudest hold how common a word is) and then turned at random, so that each attention head sees a part of everything.
    """
    with safe_open(FILE, "pt") as file:  # type: ignore[no-untyped-call]
        words, table = file.metadata()["words"].split(), file.get_tensor("vectors")
    place = {word: row for row, word in enumerate(words)}
    ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    whole = ((token[1:].lower(), number) for token, number in ids if token[0] == SPACE)
    rows = {number: place[word] for word, number in whole if word in place}
    used = sorted(set(rows.values()))
    centred = table[used] - table[used].mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))[0]
    turned = (left * values.sqrt())[:, :size] @ turn
    turned = turned / turned.norm(dim=1, keepdim=True) * size**0.5
    at = {row: index for index, row in enumerate(used)}
    numbers = _number_vectors(tokenizer, size)
    return {number: turned[at[row]] for number, row in rows.items()} | numbers


def _number_vectors(tokenizer: Tokenizer, size: int) -> dict[int, Tensor]:
    """The package has none for them: numbers are alike, those of one length more so, the more digits they share."""
    parts = torch.randn(1 + LONGEST_NUMBER * 11, size, generator=torch.Generator().manual_seed(1))
    found = {}
    for token, number in tokenizer.get_vocab().items():
        digits = token.removeprefix(SPACE)
        if digits.isdigit() and digits.isascii():
            own = [1 + 11 * place + int(digit) for place, digit in enumerate(digits)]
            vector = parts[0] + 0.5 * (parts[11 * len(digits)] + parts[own].sum(0))
            found[number] = vector / vector.norm() * size**0.5
    return found
