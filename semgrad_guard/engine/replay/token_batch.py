"""Prompts and responses of unequal length laid out as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from semgrad_guard.engine.objective import Objective


@dataclass(frozen=True)
class TokenBatch:
    """Prompts padded on the left and responses padded on the right, so that all responses begin in one column.

    `ids`, `mask` [B, N]; `prompt_columns` is where the responses begin. `segments` divides each row's response into
    consecutive parts of so many tokens, scored each by itself (one part: the whole response). `token_columns` is the
    column of each row's t*, or of the token taken in its place; `grid_columns` where each row's grid begins.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    prompt_columns: int
    segments: tuple[tuple[int, ...], ...]
    token_columns: tuple[int, ...]
    grid_columns: tuple[int, ...]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        semantic_tokens: Sequence[int],
        device: Any,
        *,
        objective: Objective | None = None,
        segments: Sequence[Sequence[int]] | None = None,
    ) -> TokenBatch:
        """Lay out token lists for `objective`; `semantic_tokens` count t* from the prompts' ends."""
        objective = objective or Objective()
        width, tail = max(map(len, prompts)), max(map(len, responses))
        ids = torch.zeros(len(prompts), width + tail, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(ids)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[row, width - len(prompt) : width] = torch.tensor(prompt, device="cpu")
            ids[row, width : width + len(response)] = torch.tensor(response, device="cpu")
            mask[row, width - len(prompt) :] = 1
        places = [objective.positions(t, len(p)) for t, p in zip(semantic_tokens, prompts, strict=True)]
        return cls(
            ids.to(device),
            mask.to(device),
            width,
            tuple(map(tuple, segments or [[len(response)] for response in responses])),
            tuple(width + token for token, _ in places),
            tuple(width + first for _, first in places),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row's response."""
        return tuple(map(sum, self.segments))

    @property
    def parts(self) -> list[int]:
        """Tokens of each part, row after row."""
        return list(chain.from_iterable(self.segments))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with room for the longest response: the span of a row without padding."""
        return self.ids.shape[1]

    @property
    def cut(self) -> int:
        """The first column that can matter to a gradient: the earliest differentiated token."""
        return min(*self.token_columns, *self.grid_columns)

    @property
    def end(self) -> int:
        """One past the last column to run: the final response token predicts nothing that is scored."""
        return self.prompt_columns + max(self.lengths) - 1

    def rows(self) -> Iterator[TokenBatch]:
        """Each row as a batch of its own, without its padding."""
        for row, length in enumerate(self.lengths):
            skip = int((self.mask[row] == 0).sum())
            columns = slice(skip, self.prompt_columns + length)
            yield TokenBatch(
                self.ids[row : row + 1, columns],
                self.mask[row : row + 1, columns],
                self.prompt_columns - skip,
                (self.segments[row],),
                (self.token_columns[row] - skip,),
                (self.grid_columns[row] - skip,),
            )

    @cached_property
    def is_padded(self) -> bool:
        """Whether a row begins later than others."""
        return not bool(self.mask[:, : self.prompt_columns].all())

    def inputs(self, start: int, end: int, *, as_generated: bool = False) -> dict[str, torch.Tensor]:
        """Model inputs for columns [start, end); the mask reaches back to column 0.

        A model numbers positions itself, in a way of its own, and gets them only where a row is padded; or where it
        shall do as in generating, where transformers passes them (`as_generated`).
        """
        inputs = {"input_ids": self.ids[:, start:end], "attention_mask": self.mask[:, :end]}
        if as_generated or self.is_padded:
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp_(min=0)[:, start:end]
        return inputs

    def predicting(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """From `states` of columns [start, end): those that predict the response tokens, row after row [n, d]."""
        first = self.prompt_columns - 1 - start
        return torch.cat([states[row, first : first + length] for row, length in enumerate(self.lengths)])

    def answering(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """From `states` of columns [start, end]: those of the response tokens themselves, row after row [n, d]."""
        return self.predicting(states, start - 1)

    def targets(self) -> torch.Tensor:
        """The response tokens, row after row [n]."""
        begin = self.prompt_columns
        return torch.cat([self.ids[row, begin : begin + length] for row, length in enumerate(self.lengths)])
