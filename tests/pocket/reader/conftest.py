"""A few questions."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer

from semgrad_guard.pocket.frames import Reading, bank, plain
from semgrad_guard.pocket.reader.material import Material
from semgrad_guard.pocket.reader.questions import Questions, prompts


@pytest.fixture(scope="session")
def readings() -> list[Reading]:
    random = Random(1)
    return [plain(frame, random) for frame in bank()[1][:8]]


@pytest.fixture(scope="session")
def material(tokenizer: Tokenizer) -> Material:
    return Material(tokenizer, seed=3, rank=0, size=4)


@pytest.fixture(scope="session")
def questions(tokenizer: Tokenizer, material: Material, readings: list[Reading]) -> Questions:
    """Twelve questions of different lengths."""
    return material.collate([p for reading in readings for p in prompts(tokenizer, reading)][:12])
