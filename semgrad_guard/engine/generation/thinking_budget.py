"""`ThinkingBudget`: ends thoughts after so many tokens, by the chat template's own mark."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from semgrad_guard.engine.generation.visible import Codec
from semgrad_guard.engine.prompts.reasoning import Thinking


class ThinkingBudget(LogitsProcessor):
    """Where a row's thought is open after `budget` tokens, the next ones are those that close it, whatever is likely.

    `thinking` is how each row's model thinks, None where its marks are not known; prompts take `width` columns.
    """

    def __init__(self, budget: int, thinking: Sequence[Thinking | None], codec: Codec, *, width: int) -> None:
        self._budget, self._thinking, self._codec, self._width = budget, thinking, codec, width
        self._closing = [() if own is None else codec.encode(own.marks.closing) for own in thinking]
        self._open: list[bool] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        place = input_ids.shape[1] - self._width - self._budget
        if place < 0:
            return scores
        if not self._open:
            rows = input_ids[:, self._width : self._width + self._budget].tolist()
            self._open = [self._is_open(*pair) for pair in zip(rows, self._thinking, strict=True)]
        for row, (is_open, closing) in enumerate(zip(self._open, self._closing, strict=True)):
            if is_open and place < len(closing):
                forced = torch.full_like(scores[row], -math.inf)  # the model's own scores are kept for scoring
                forced[closing[place]] = 0.0
                scores = scores.index_copy(0, torch.tensor([row], device=scores.device), forced[None])
        return scores

    def _is_open(self, ids: Sequence[int], thinking: Thinking | None) -> bool:
        if thinking is None:
            return False
        decode = self._codec.decode
        return thinking.is_open(thinking.seen(ids, decode(ids, special=True), decode))
