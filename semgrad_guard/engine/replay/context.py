"""Rows of which the tokens between prompt and response are context: constants, by keys and values that are known.

Two passes with one graph: the prompts from t* on; then the last token of the context, which predicts the response's
first, and the response. The context before it is read from a cache, so that its length costs next to nothing. Where a
model takes masks as they are given, both are one pass, in which each product reads its weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer

from semgrad_guard.engine.replay.batch import PrefixLayer, TokenBatch
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.kernels import Outputs

Held = Callable[[CapturedStates, int, int], torch.Tensor]
"""A tensor [1, columns, d] of the states of one row, at the columns from one to before another."""


class ContextRows:
    """A batch with context, and for each of its rows the states of its text: those of one row, without padding.

    Their caches reach to the context's last token. Layers below `bypassed` are left out of both passes.
    """

    def __init__(self, batch: TokenBatch, sources: Sequence[CapturedStates], *, bypassed: int) -> None:
        self._sources, self._bypassed, self._width = sources, bypassed, batch.prompt_columns - 1
        self._ids = [row[own.bool()] for row, own in zip(batch.ids, batch.mask, strict=True)]
        self._padding: list[int] = (batch.prompts.mask == 0).sum(1).tolist()
        self._begins = [batch.prompts.cut - padding for padding in self._padding]
        skipped: list[int] = (batch.mask == 0).sum(1).tolist()
        self._ends = [end - padding for end, padding in zip(batch.prompt_ends, skipped, strict=True)]
        self._last = [end + own - 1 for end, own in zip(self._ends, batch.context, strict=True)]
        self._until = [last + length for last, length in zip(self._last, batch.lengths, strict=True)]

    @property
    def prompt_columns(self) -> int:
        """The columns of the first pass."""
        return max(end - begin for begin, end in zip(self._begins, self._ends, strict=True))

    @property
    def live(self) -> slice:
        """The columns before those of the second pass whose keys have a gradient."""
        rows = [*zip(self._begins, self._ends, self._last, strict=True)]
        begin = min(self._width - last + begin for begin, _, last in rows)
        return slice(begin, max(self._width - last + end for _, end, last in rows))

    def of_prompts(self, held: Held) -> torch.Tensor:
        """The columns of the first pass [B, columns, d]."""
        return _below(self._cut(held, self._begins, self._ends), left=False)

    def of_responses(self, held: Held) -> torch.Tensor:
        """The columns of the second pass [B, columns, d]."""
        return _below(self._cut(held, self._last, self._until), left=False)

    def of_both(self, held: Held) -> torch.Tensor:
        """The columns of both passes in one [B, columns, d]."""
        return torch.cat([self.of_prompts(held), self.of_responses(held)], dim=1)

    def inputs_of_both(self) -> dict[str, torch.Tensor]:
        """The model's inputs for the columns of both passes in one, behind `before_both`.

        Keys are not in their texts' order: the mask [B, 1, columns, keys] names those at no later position than a
        query's own.
        """
        never = self._width + max(map(len, self._ids))  # the position of padding
        pads = partial(pad_sequence, batch_first=True, padding_value=never)
        rows = [*zip(self._begins, self._ends, self._last, self._until, strict=True)]
        prompts = pads([torch.arange(begin, end) for begin, end, *_ in rows])
        responses = pads([torch.arange(last, until) for *_, last, until in rows])
        before = [torch.cat([torch.arange(begin), torch.arange(end, last)]) for begin, end, last, _ in rows]
        columns = torch.cat([prompts, responses], dim=1)
        keys = torch.cat([pads(before, padding_side="left"), columns], dim=1)[:, None, None]
        states = self._sources[0].states
        mask = torch.zeros(len(rows), 1, columns.shape[1], keys.shape[-1], dtype=states.dtype)
        mask.masked_fill_((keys > columns[:, None, :, None]) | (keys == never), torch.finfo(states.dtype).min)
        positions = columns.masked_fill(columns == never, 0).to(states.device)
        ids = torch.stack([row[own] for row, own in zip(self._ids, positions, strict=True)])
        return {"input_ids": ids, "attention_mask": mask.to(states.device), "position_ids": positions}

    def before_both(self) -> Cache:
        """The cache before them: of the prompts, and of the context without its last token."""
        rows = [*zip(self._begins, self._ends, self._last, strict=True)]
        constant = slice(self.prompt_columns, self.prompt_columns + 1)

        def layer(number: int) -> PrefixLayer:
            halves = [
                [
                    torch.cat([keys[..., :begin, :], keys[..., end:last, :]], dim=-2)
                    for keys, (begin, end, last) in zip(half, rows, strict=True)
                ]
                for half in self._halves(number)
            ]
            return PrefixLayer(*(_below(half, left=True) for half in halves), constant=constant)

        return self._cache(layer, max(begin + last - end for begin, end, last in rows))

    def outputs(self, columns: Callable[[Held], torch.Tensor]) -> Outputs:
        """The outputs of linear maps that all sources hold, at the columns of one pass."""
        stretches = [*zip(self._begins, self._ends, strict=True)], [*zip(self._last, self._until, strict=True)]
        if any(source.lacks(*own) for some in stretches for source, own in zip(self._sources, some, strict=True)):
            return {}
        places = set(self._sources[0].outputs).intersection(*(source.outputs for source in self._sources))
        return {place: columns(lambda source, *own, place=place: source.output(place, *own)) for place in places}

    def before_prompts(self) -> Cache:
        """The cache before the first pass."""

        def layer(number: int) -> PrefixLayer:
            rows = (zip(half, self._begins, strict=True) for half in self._halves(number))
            return PrefixLayer(*(_below([keys[..., :begin, :] for keys, begin in half], left=True) for half in rows))

        return self._cache(layer, max(self._begins))

    def before_responses(self, prompts: Cache) -> Cache:
        """The cache before the second pass, behind the one with which the first has read the prompts."""

        def layer(number: int) -> PrefixLayer:
            read: Any = prompts.layers[number]
            both = zip(read.joined, self._halves(number), strict=True)
            return PrefixLayer(*(self._joined(*half) for half in both), constant=slice(0, 1))

        return self._cache(layer, self._width)

    def _joined(self, prompts: torch.Tensor, known: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys of the prompts as they were read, and of each row's context without its last token."""
        rows = zip(prompts.split(1), known, self._padding, self._ends, self._last, strict=True)
        joined = [
            torch.cat([read[..., padding : padding + end, :], keys[..., end:last, :]], dim=-2)
            for read, keys, padding, end, last in rows
        ]
        return _below(joined, left=True)

    def _cache(self, layer: Callable[[int], PrefixLayer], columns: int) -> Cache:
        """The layers; others of so many columns in the place of those that are bypassed."""
        layers, first = list[Any](), self._sources[0]
        held: list[Any] = first.cache.layers
        for number, known in enumerate(held):
            if number < self._bypassed:
                nothing = torch.zeros(1, device=first.states.device).expand(len(self._sources), 1, columns, 1)
                layers.append(PrefixLayer(nothing, nothing))
            else:
                layers.append(layer(number) if known.is_initialized else DynamicLayer())
        return Cache(layers=layers)

    def _cut(self, held: Held, begins: Sequence[int], ends: Sequence[int]) -> list[torch.Tensor]:
        return [held(*row) for row in zip(self._sources, begins, ends, strict=True)]

    def _halves(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The rows' keys, and their values, of one layer."""
        layers: list[Any] = [source.cache.layers[number] for source in self._sources]
        return [layer.keys for layer in layers], [layer.values for layer in layers]


def _below(rows: Sequence[torch.Tensor], *, left: bool) -> torch.Tensor:
    """Rows [1, ..., n, d] below each other, the shorter ones filled up with zeros on the left, or on the right."""
    longest = max(row.shape[-2] for row in rows)
    missing = [longest - row.shape[-2] for row in rows]
    return torch.cat([F.pad(row, (0, 0, n, 0) if left else (0, 0, 0, n)) for row, n in zip(rows, missing, strict=True)])
