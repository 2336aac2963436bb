"""The tokenizer of the training script, and first embeddings that know which words are alike."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity

from research.pocket.make_tokenizer import NUMBERS, build_tokenizer
from research.pocket.tokenizer import ROLES
from research.pocket.word_vectors import common_words, token_vectors, word_of


def test_numbers_and_common_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.get_vocab()
    assert all(number in tokens for number in NUMBERS)
    given_up = {f"Ġ{number}" for number in NUMBERS} - set(tokens)
    assert given_up == {f"Ġ{number:03}" for number in range(30)}
    assert tokenizer.encode("costs 1,782.13 at 9:30").tokens == [
        "Ġcosts",
        "Ġ1",
        ",7",
        "82",
        ".1",
        "3",
        "Ġat",
        "Ġ9",
        ":3",
        "0",
    ]
    assert sum(f"Ġ{word}" in tokens for word in common_words()[:1000]) > 850
    assert tokenizer.decode(tokenizer.encode("In 1997, for 5,818\n12 men").ids) == "In 1997, for 5,818\n12 men"


@pytest.mark.parametrize(
    ("word", "like", "unlike"),
    [
        ("guarantee", "warranty", "river"),
        ("monday", "tuesday", "cheese"),
        ("founded", "established", "green"),
        ("786", "785", "512"),
    ],
)
def test_words_that_are_alike_have_vectors_that_are(tokenizer: Tokenizer, word: str, like: str, unlike: str) -> None:
    vectors = token_vectors(tokenizer, 95)
    one, near, far = (vectors[tokenizer.token_to_id(f"Ġ{w}")] for w in (word, like, unlike))
    assert cosine_similarity(one, near, dim=0) > cosine_similarity(one, far, dim=0) + 0.1


def test_vectors_are_as_loud_as_random_ones(tokenizer: Tokenizer) -> None:
    vectors = token_vectors(tokenizer, 95)
    assert len(vectors) > 5000
    torch.testing.assert_close(vectors[tokenizer.token_to_id("Ġriver")].square().mean(), torch.tensor(1.0))
    assert torch.stack(list(vectors.values())).std(0).max() < 1.5


def test_pieces_of_words_have_no_meaning() -> None:
    assert (word_of("ĠRiver"), word_of("iver"), word_of("Ġ")) == ("river", None, None)


def test_the_command_learns_numbers_and_role_names() -> None:
    tokens = build_tokenizer(300, 9000).get_vocab()
    assert all(f"Ġ{number}" in tokens for number in range(100))
    assert f"Ġ{ROLES[0]}" in tokens
