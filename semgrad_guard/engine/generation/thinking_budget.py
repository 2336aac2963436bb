"""`ThoughtLimit`: ends a thought after so many tokens, by the chat template's own mark."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from semgrad_guard.engine.generation.visible import Codec
from semgrad_guard.engine.prompts.reasoning import Thinking


class ThoughtLimit:
    """Where an answer's thought is open after `budget` tokens, the next ones are those that close it.

    `thinking` is how its model thinks, None where the marks are not known: then nothing is closed.
    """

    def __init__(self, budget: int, thinking: Thinking | None, codec: Codec) -> None:
        self.begin, self._thinking, self._codec = budget, thinking, codec
        self._closing = () if thinking is None else codec.encode(thinking.marks.closing)
        self.end = budget + len(self._closing)
        self._open: bool | None = None

    def forced(self, ids: Sequence[int]) -> int | None:
        """The token behind these of the answer, where the model has no choice."""
        if not self.begin <= len(ids) < self.end:
            return None
        if self._open is None:
            self._open = self._is_open(ids[: self.begin])
        return self._closing[len(ids) - self.begin] if self._open else None

    def _is_open(self, ids: Sequence[int]) -> bool:
        decode, thinking = self._codec.decode, self._thinking
        return thinking is not None and thinking.is_open(thinking.seen(ids, decode(ids, special=True), decode))


def force(scores: torch.Tensor, token: int) -> None:
    """Leave a row [V] of scores one likely token; the model's own scores are kept elsewhere for scoring."""
    scores.fill_(-math.inf)
    scores[token] = 0.0


class ThinkingBudget(LogitsProcessor):
    """The limits of the rows of a batch, whose prompts take `width` columns."""

    def __init__(self, limits: Sequence[ThoughtLimit], *, width: int) -> None:
        self._limits, self._width = limits, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        count, found = input_ids.shape[1] - self._width, scores
        for row, limit in enumerate(self._limits):
            if limit.begin <= count < limit.end:
                token = limit.forced(input_ids[row, self._width :].tolist())
                if token is not None:
                    found = found.clone() if found is scores else found
                    force(found[row], token)
        return found
