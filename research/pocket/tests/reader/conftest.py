"""A few questions, a reader that knows their answers, and the Llama that it is written into."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.frames import Reading, bank, plain
from research.pocket.reader.material import Material
from research.pocket.reader.network import Reader
from research.pocket.reader.questions import Questions, prompts
from research.pocket.reader.to_llama import to_llama
from research.pocket.reader.train import ReaderRun, ReaderSettings


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


@pytest.fixture(scope="session")
def trained(tokenizer: Tokenizer, questions: Questions) -> Reader:
    """A reader that knows twelve questions by heart."""
    run = ReaderRun(ReaderSettings(steps=300, compiled=False), None, tokenizer)
    for _ in range(60):
        run.one_step(questions)
    return run.reader


@pytest.fixture(scope="session")
def llama(trained: Reader, tokenizer: Tokenizer) -> LlamaForCausalLM:
    model = to_llama(trained, tokenizer)
    model.set_attn_implementation("eager")
    return model
