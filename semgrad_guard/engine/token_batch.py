"""Prompts and responses of unequal length laid out as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TokenBatch:
    """Prompts padded on the left and responses padded on the right, so that all responses begin in one column.

    `ids`, `mask` [B, N]; `prompt_columns` is where the responses begin; `lengths` their tokens; `semantic_columns`
    the column of each row's t*.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    prompt_columns: int
    lengths: tuple[int, ...]
    semantic_columns: tuple[int, ...]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], offsets: Sequence[int], device: Any
    ) -> TokenBatch:
        """Lay out token lists; `offsets` count each t* from its prompt's end (-1 = last token)."""
        width, tail = max(map(len, prompts)), max(map(len, responses))
        ids = torch.zeros(len(prompts), width + tail, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(ids)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[row, width - len(prompt) : width] = torch.tensor(prompt, device="cpu")
            ids[row, width : width + len(response)] = torch.tensor(response, device="cpu")
            mask[row, width - len(prompt) :] = 1
        columns = tuple(width + offset for offset in offsets)
        return cls(ids.to(device), mask.to(device), width, tuple(map(len, responses)), columns)

    @property
    def cut(self) -> int:
        """The first column that can matter to a gradient: the earliest t*."""
        return min(self.semantic_columns)

    @property
    def end(self) -> int:
        """One past the last column to run: the final response token predicts nothing that is scored."""
        return self.prompt_columns + max(self.lengths) - 1

    def rows(self) -> Iterator[TokenBatch]:
        """Each row as a batch of its own, without its padding."""
        for row, length in enumerate(self.lengths):
            skip = int((self.mask[row] == 0).sum())
            columns = slice(skip, self.prompt_columns + length)
            ids, mask = self.ids[row : row + 1, columns], self.mask[row : row + 1, columns]
            yield TokenBatch(ids, mask, self.prompt_columns - skip, (length,), (self.semantic_columns[row] - skip,))

    def inputs(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Model inputs for columns [start, end); the mask reaches back to column 0."""
        positions = (self.mask.cumsum(1) - 1).clamp_(min=0)
        return {
            "input_ids": self.ids[:, start:end],
            "attention_mask": self.mask[:, :end],
            "position_ids": positions[:, start:end],
        }

    def predicting(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """From `states` of columns [start, end): those that predict the response tokens, row after row [n, d]."""
        first = self.prompt_columns - 1 - start
        return torch.cat([states[row, first : first + length] for row, length in enumerate(self.lengths)])

    def targets(self) -> torch.Tensor:
        """The response tokens, row after row [n]."""
        begin = self.prompt_columns
        return torch.cat([self.ids[row, begin : begin + length] for row, length in enumerate(self.lengths)])
