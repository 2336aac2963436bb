"""The tokenizer of the training script, and first embeddings that know which words are alike."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity

from semgrad_guard.pocket.muon import Optimizers
from semgrad_guard.pocket.settings import NUMBERS, Settings, build_model, build_tokenizer
from semgrad_guard.pocket.word_vectors import common_words, token_vectors, word_of


@pytest.fixture(scope="module")
def learned() -> Tokenizer:
    return build_tokenizer(Settings())


def test_numbers_and_common_words_are_single_tokens(learned: Tokenizer) -> None:
    tokens = learned.get_vocab()
    assert all(number in tokens and f"Ġ{number}" in tokens for number in NUMBERS)
    assert sum(f"Ġ{word}" in tokens for word in common_words()[:1000]) > 850
    assert learned.decode(learned.encode("In 1997, for 5,818\n12 men").ids) == "In 1997, for 5,818\n12 men"


@pytest.mark.parametrize(
    ("word", "like", "unlike"),
    [
        ("guarantee", "warranty", "river"),
        ("monday", "tuesday", "cheese"),
        ("founded", "established", "green"),
        ("786", "785", "512"),
    ],
)
def test_words_that_are_alike_begin_alike(learned: Tokenizer, word: str, like: str, unlike: str) -> None:
    settings = Settings()
    embedding = build_model(settings, learned).model.embed_tokens.weight.detach()[:, 1 : settings.width // 2]
    one, near, far = (embedding[learned.token_to_id(f"Ġ{w}")] for w in (word, like, unlike))
    assert cosine_similarity(one, near, dim=0) > cosine_similarity(one, far, dim=0) + 0.1
    assert cosine_similarity(one, near, dim=0) < 0.9  # a copying model must still tell them apart


def test_vectors_are_as_loud_as_random_ones(learned: Tokenizer) -> None:
    vectors = token_vectors(learned, 95)
    assert len(vectors) > 5000
    torch.testing.assert_close(vectors[learned.token_to_id("Ġriver")].square().mean(), torch.tensor(1.0))
    assert torch.stack(list(vectors.values())).std(0).max() < 1.5


def test_pieces_of_words_have_no_meaning() -> None:
    assert (word_of("ĠRiver"), word_of("iver"), word_of("Ġ")) == ("river", None, None)


def test_embeddings_move_slowly(tokenizer: Tokenizer, small: Settings) -> None:
    model = build_model(small, tokenizer)
    both = [model.lm_head.weight, model.model.embed_tokens.weight]
    before = [p.detach().clone() for p in both]
    for p in both:
        p.grad = torch.ones_like(p)
    Optimizers(model, small).step(0.01)
    head, embedding = ((p.detach() - b).abs().mean() for p, b in zip(both, before, strict=True))
    torch.testing.assert_close(embedding / head, torch.tensor(small.embedding_rate), rtol=0.05, atol=0)
