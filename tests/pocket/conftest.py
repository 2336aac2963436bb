"""Small models and the shipped tokenizer, for the pocket room's tests; one thread, as in training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from semgrad_guard.pocket import POCKET_PATH
from semgrad_guard.pocket.settings import Settings


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(POCKET_PATH / "tokenizer.json"))


@pytest.fixture
def small() -> Settings:
    """The real training at a small size: 20 steps take seconds."""
    return Settings(steps=20, tokens=400, warm_up=4, width=64, heads=4, groups=2, inner=128, layers=2, workers=1)
