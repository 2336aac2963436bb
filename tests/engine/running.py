"""Answers of tiny models that join and leave a running batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.writing import WrittenAnswer
from tests.random_llama import byte_tokenizer

from .tiny_models import build

Options = GenerationOptions
Wanted = tuple[str, GenerationOptions]
SETTINGS: dict[str, Any] = {
    "vocab_size": 258,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "max_position_embeddings": 300,
}


def wrapped(name: str, **changes: Any) -> LanguageModel:
    """A tiny model that reads and writes bytes, in float32 unless `changes` say otherwise."""
    return named(build(name, **{"dtype": torch.float32, **SETTINGS, **changes}))


def named(model: PreTrainedModel) -> LanguageModel:
    """A model of bytes."""
    return LanguageModel.from_transformers(model, byte_tokenizer())


shared = cache(wrapped)


def row_of(
    model: LanguageModel, wanted: Wanted, listener: Callable[[Any], None] | None = None, *, token: int | None = None
) -> WrittenAnswer:
    """The answer to a question, to be written; `token` is another t* for its prompt, counted from the end."""
    question, options = wanted
    prompt = model.render(question)
    if token is not None:
        prompt = replace(prompt, semantic_token=replace(prompt.semantic_token, offset=max(token, -len(prompt.ids))))
    return WrittenAnswer(model, prompt, model.fitted(options, prompt), listener=listener)


def joined(model: LanguageModel, batch: RunningBatch, wanted: Sequence[Wanted]) -> list[WrittenAnswer]:
    """The rows of some questions in a batch."""
    rows = [row_of(model, item) for item in wanted]
    batch.join(rows)
    return rows


def finished(batch: RunningBatch) -> None:
    """Write until no row is left."""
    while batch.rows:
        batch.step()
