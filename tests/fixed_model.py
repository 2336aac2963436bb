"""A model that can write one text of three sentences only."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.prompts.prompt import Prompt

PIECES = ("Tea is old. ", "Milk is hot! ", "Go.")
TEXT = "".join(PIECES)


class FixedModel(LanguageModel):
    """Its grammar allows `TEXT` alone."""

    @classmethod
    def like(cls, model: LanguageModel) -> Self:
        """The weights and the tokenizer of another model."""
        return cls.from_transformers(model._model, model.tokenizer)

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        return replace(super().fitted(options, *prompts), max_tokens=64, grammar=f'start: "{TEXT}"')
