"""Small models and the shipped tokenizer, for the pocket room's tests; one thread, as in training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from research.pocket.reader.network import Reader
from research.pocket.reader.train import build_reader
from research.pocket.settings import Settings
from research.pocket.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@pytest.fixture
def reader(tokenizer: Tokenizer) -> Reader:
    """An untrained one."""
    return build_reader(tokenizer, 0)


@pytest.fixture
def small() -> Settings:
    """The real training, briefly: 20 steps take seconds."""
    return Settings(steps=20, tokens=400, workers=1)
