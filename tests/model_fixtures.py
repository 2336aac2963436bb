"""A pytest plugin: one thread, and models for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from semgrad_guard import LanguageModel

from .engine.tiny_pair_models import save_pair_model
from .random_llama import CHATML, byte_tokenizer, random_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def language_model(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.from_transformers(random_llama(), tokenizer, name="random-llama")


@pytest.fixture(scope="session")
def make_language_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., LanguageModel]:
    """Another random model: `make_language_model(seed=1, max_position_embeddings=64)`."""

    def make(*, chat_template: str | None = CHATML, words: str = "", **changes: object) -> LanguageModel:
        tokenizer = byte_tokenizer(chat_template=chat_template, words=words)
        model = random_llama(**{"vocab_size": len(tokenizer), **changes})  # type: ignore[arg-type]
        return LanguageModel.from_transformers(model, tokenizer, name="random-llama")

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The random model as a folder on disk, in float32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    random_llama().float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_pair_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random sequence classifier on disk: `make_pair_model(labels=MNLI, architecture="bert", seed=0)`."""

    def make(**options: object) -> Path:
        return save_pair_model(tmp_path_factory.mktemp("classifier") / "model", **options)  # type: ignore[arg-type]

    return make
