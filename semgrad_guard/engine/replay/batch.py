"""The rows of a batch: prompts and responses in common columns, their KV caches, and the memory that they may take.

Read-only cuts of a cache end before t*. Rows that come and go end in one column, and begin where their prompt begins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import UnsupportedModelError


@dataclass(frozen=True)
class TokenBatch:
    """Prompts padded on the left and responses padded on the right, so that all responses begin in one column.

    `ids`, `mask` [B, N]; `prompt_columns` is where the responses begin. The first `before` tokens of each row's
    response (a thought) are the context of the scored ones, and are not scored. `segments` divides the scored tokens
    into consecutive parts of so many, scored each by itself (one part: all of them). `token_columns` is the
    column of each row's t*, or of the token taken in its place; `grid_columns` where each row's grid begins.
    `context` is how many tokens between each row's prompt and its response are constants to the gradient, by their keys
    and values (earlier sentences); empty for none. They count to the prompt's columns.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    prompt_columns: int
    segments: tuple[tuple[int, ...], ...]
    token_columns: tuple[int, ...]
    grid_columns: tuple[int, ...]
    before: tuple[int, ...]
    context: tuple[int, ...] = ()

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
        before: Sequence[int] | None = None,
        context: Sequence[Sequence[int]] | None = None,
    ) -> TokenBatch:
        """Lay out token lists for `objective`; `semantic_tokens` count t* from the prompts' ends."""
        before = before or [0] * len(prompts)
        objective = objective or Objective()
        within = context or [()] * len(prompts)
        begins = [(*prompt, *own) for prompt, own in zip(prompts, within, strict=True)]
        width, tail = max(map(len, begins)), max(map(len, responses))
        ids = torch.zeros(len(prompts), width + tail, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(ids)
        for row, (begin, response) in enumerate(zip(begins, responses, strict=True)):
            ids[row, width - len(begin) : width] = torch.tensor(begin, device="cpu")
            ids[row, width : width + len(response)] = torch.tensor(response, device="cpu")
            mask[row, width - len(begin) :] = 1
        ends = [width - len(own) for own in within]
        places = [objective.positions(t, len(p)) for t, p in zip(semantic_tokens, prompts, strict=True)]
        return cls(
            ids.to(device),
            mask.to(device),
            width,
            tuple(map(tuple, segments or [[len(ids) - own] for ids, own in zip(responses, before, strict=True)])),
            tuple(end + token for end, (token, _) in zip(ends, places, strict=True)),
            tuple(end + first for end, (_, first) in zip(ends, places, strict=True)),
            tuple(before),
            tuple(map(len, within)) if any(within) else (),
        )

    @cached_property
    def prompts(self) -> TokenBatch:
        """The prompts alone, whose differentiated tokens begin in one column; without context, the batch itself."""
        if not self.context:
            return self
        pads: list[int] = (self.mask == 0).sum(1).tolist()
        cuts = [*map(min, self.token_columns, self.grid_columns)]
        places = [cut - pad for cut, pad in zip(cuts, pads, strict=True)]
        columns = [slice(pad, end) for pad, end in zip(pads, self.prompt_ends, strict=True)]
        ids = _aligned([row[own] for row, own in zip(self.ids, columns, strict=True)], places)
        return TokenBatch(
            ids,
            _aligned([row[own] for row, own in zip(self.mask, columns, strict=True)], places, filling=1),
            ids.shape[1],
            self.segments,
            tuple(column + max(places) - cut for column, cut in zip(self.token_columns, cuts, strict=True)),
            tuple(column + max(places) - cut for column, cut in zip(self.grid_columns, cuts, strict=True)),
            self.before,
        )

    @classmethod
    def stacked(cls, rows: Sequence[TokenBatch]) -> TokenBatch:
        """Batches of one row each as one, all of them with context or all without."""
        places = [row.prompt_columns for row in rows]
        shifts = [max(places) - place for place in places]
        return cls(
            _aligned([row.ids[0] for row in rows], places),
            _aligned([row.mask[0] for row in rows], places, filling=1),
            max(places),
            tuple(row.segments[0] for row in rows),
            tuple(row.token_columns[0] + shift for row, shift in zip(rows, shifts, strict=True)),
            tuple(row.grid_columns[0] + shift for row, shift in zip(rows, shifts, strict=True)),
            tuple(row.before[0] for row in rows),
            tuple(own for row in rows for own in row.context),
        )

    @property
    def prompt_ends(self) -> tuple[int, ...]:
        """The column in which each row's context, or else its response, begins."""
        return tuple(self.prompt_columns - own for own in self.context or (0,) * len(self.segments))

    def parts_in_context(self) -> Iterator[TokenBatch]:
        """Each part of one row's response as a batch of its own, all before it in the response as context."""
        (scored,), (parts,) = self.scored, self.segments
        for begin, end in pairwise(accumulate(parts, initial=scored.start)):
            context = (begin - self.prompt_columns,) if begin > self.prompt_columns else ()
            ids, mask = self.ids[:, :end], self.mask[:, :end]
            tokens = self.token_columns, self.grid_columns
            yield TokenBatch(ids, mask, begin, ((end - begin,),), *tokens, (0,), context)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Scored tokens of each row."""
        return tuple(map(sum, self.segments))

    @cached_property
    def scored(self) -> tuple[slice, ...]:
        """The columns of each row's scored tokens."""
        begins = [self.prompt_columns + before for before in self.before]
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.lengths, strict=True))

    @property
    def first(self) -> int:
        """The first column with a scored token."""
        return min(columns.start for columns in self.scored)

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
        return max(columns.stop for columns in self.scored) - 1

    @property
    def replayed_columns(self) -> int:
        """The columns of a row that are read again: the prompt from the cut on, and what follows any context."""
        return self.prompts.prompt_columns - self.prompts.cut + self.end + 1 - self.prompt_columns

    def rows(self) -> Iterator[TokenBatch]:
        """Each row as a batch of its own, without its padding."""
        for row, scored in enumerate(self.scored):
            skip = int((self.mask[row] == 0).sum())
            columns = slice(skip, scored.stop)
            yield TokenBatch(
                self.ids[row : row + 1, columns],
                self.mask[row : row + 1, columns],
                self.prompt_columns - skip,
                (self.segments[row],),
                (self.token_columns[row] - skip,),
                (self.grid_columns[row] - skip,),
                (self.before[row],),
                self.context[row : row + 1] if any(self.context[row : row + 1]) else (),
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
        """From `states` of columns [start, end): those that predict the scored tokens, row after row [n, d]."""
        shift = 1 + start
        return torch.cat([states[row, own.start - shift : own.stop - shift] for row, own in enumerate(self.scored)])

    def answering(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """From `states` of columns [start, end]: those of the scored tokens themselves, row after row [n, d]."""
        return self.predicting(states, start - 1)

    def targets(self) -> torch.Tensor:
        """The scored tokens, row after row [n]."""
        return torch.cat([self.ids[row, own] for row, own in enumerate(self.scored)])


def _aligned(rows: Sequence[torch.Tensor], places: Sequence[int], *, filling: int = 0) -> torch.Tensor:
    """Rows below each other, their `places` in one column: with zeros before them, and the filling behind."""
    behind = max(len(row) - place for row, place in zip(rows, places, strict=True))
    padded = [F.pad(row, (max(places) - place, 0)) for row, place in zip(rows, places, strict=True)]
    width = max(places) + behind
    return torch.stack([F.pad(row, (0, width - len(row)), value=filling) for row in padded])


CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name that the installed transformers gives a model's cache, in its arguments and its outputs."""


def cache_of(output: Any) -> Cache:
    """The cache that a model's `generate` left in its output."""
    left: Cache = getattr(output, CACHE)
    return left


class PrefixLayer(DynamicLayer):
    """One layer's keys and values [batch, heads, length, d] of the positions before the cut, if there are any.

    `update` answers with prefix and new states joined and adds nothing to them, so that one prefix serves any number of
    replays and the cache it was cut from stays as it was. The `constant` columns among the new ones let no gradient
    pass. `joined` is its last answer.
    """

    def __init__(self, *prefix: torch.Tensor, constant: slice | None = None) -> None:
        super().__init__()
        self._prefix, self._constant = prefix, constant
        self.joined: tuple[torch.Tensor, ...] = ()
        if prefix:
            self.keys, self.values = prefix
            self.dtype, self.device = self.keys.dtype, self.keys.device
            self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = [key_states, value_states]
        if (own := self._constant) is not None:
            new = [
                torch.cat([x[..., : own.start, :], x[..., own, :].detach(), x[..., own.stop :, :]], dim=-2) for x in new
            ]
        if self._prefix:
            new = [torch.cat(both, dim=-2) for both in zip(self._prefix, new, strict=True)]
        self.joined = keys, values = new[0], new[1]
        return keys, values


def growing_cache() -> DynamicCache:
    """An empty cache that keeps every key, sliding windows too: the mask alone decides what a query sees.

    (A `DynamicCache` made from the model's config drops keys outside the window, which a replay would miss.)
    """
    return DynamicCache()


def can_be_cut(cache: Cache, length: int) -> bool:
    """Whether every layer that was written to is a plain growing attention cache of `length` positions or more."""
    layers: list[Any] = cache.layers
    written = [layer for layer in layers if layer.is_initialized]
    return bool(written) and all(type(layer) is DynamicLayer and layer.get_seq_length() >= length for layer in written)


def cut(cache: Cache, length: int) -> Cache | None:
    """The first `length` positions of `cache` as a read-only cache; None for length 0.

    A layer that was never written to (it was left out of the pass) stays empty.

    Raises:
        UnsupportedModelError: a layer is no plain growing attention cache, or holds fewer than `length` positions.
    """
    if length == 0:
        return None
    if not can_be_cut(cache, length):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise UnsupportedModelError(f"a cache of {', '.join(kinds)} cannot be cut at position {length}")
    layers: list[Any] = cache.layers
    return Cache(
        layers=[
            PrefixLayer(layer.keys[..., :length, :], layer.values[..., :length, :])
            if layer.is_initialized
            else DynamicLayer()
            for layer in layers
        ]
    )


KeysValues = tuple[torch.Tensor, torch.Tensor]


def can_be_taken_apart(cache: Cache) -> bool:
    """Whether every layer is a plain growing attention cache that was written to."""
    layers: list[Any] = cache.layers
    return all(type(layer) is DynamicLayer and layer.is_initialized for layer in layers)


def stacked(caches: Sequence[Cache]) -> DynamicCache:
    """Caches of the same model below each other, the shorter ones filled up with zeros on the left."""
    longest = max(cache.get_seq_length() for cache in caches)
    below: dict[int, list[torch.Tensor]] = {}
    layers_of = [keys_and_values(cache) for cache in caches]
    for number in layers_of[0]:
        wide = [[F.pad(half, (0, 0, longest - half.shape[-2], 0)) for half in layers[number]] for layers in layers_of]
        below[number] = [torch.cat(halves) for halves in zip(*wide, strict=True)]
    return cache_with(below)


def kept(cache: Cache, rows: Sequence[int], start: int, end: int | None = None) -> DynamicCache:
    """A copy of some rows and of the columns [start, end), that holds nothing of the rest."""
    index = torch.tensor(list(rows))
    return cache_with(
        {
            number: [half[index.to(half.device), :, start:end] for half in layer]
            for number, layer in keys_and_values(cache).items()
        }
    )


def keys_and_values(cache: Cache) -> dict[int, KeysValues]:
    """Of each layer that ran, by its number: layers of cross-attention do not without an image."""
    layers: list[Any] = cache.layers
    return {number: (layer.keys, layer.values) for number, layer in enumerate(layers) if layer.is_initialized}


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values."""
    return sum(half.nbytes for layer in keys_and_values(cache).values() for half in layer)


def cache_with(layers: Mapping[int, Sequence[torch.Tensor]]) -> DynamicCache:
    """A growing cache of these keys and values, by the numbers of their layers."""
    cache = growing_cache()
    for number, (keys, values) in layers.items():
        cache.update(keys, values, number)
    return cache


T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes. Beyond them scores cost time instead; they stay the same, but for roundings of half precision.

    `logits`: the head's outputs that a generation keeps, and those kept between the two passes over the vocabulary;
    beyond it they are computed again for gradients, and surveyed while generating for scores without one.
    `activations`: the states kept for a replay's backward pass; beyond it only every decoder layer's input is kept, and
    the layer is run once more (about a forward pass of the upper layers).
    `outputs`: the outputs of the upper layers' linear maps while generating; those beyond it are computed again.

    `running`: keys and values of the answers that are written at once, with room for their longest. Beyond it further
    answers wait; one is always written.
    """

    logits: int = 96 << 20
    activations: int = 512 << 20
    outputs: int = 96 << 20
    running: int = 1 << 30


FRUGAL = Memory(logits=0, activations=0, outputs=0)
"""As little as can be: tens of megabytes for a model of half a billion parameters, whatever the answer's length."""


OUT_OF_MEMORY = (
    "memory ran out while the answer was scored: set model.memory = FRUGAL, which holds less, or score shorter prompts "
    "and smaller batches"
)
"""Why there is no score where there was no room for one."""

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of whichever device (a CPU's allocator has no error of its own)."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def unless_memory_runs_out(work: Callable[[], T]) -> T | None:
    """The result of `work`; None where there is no room for it."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_back_memory()
    return None


def give_back_memory() -> None:
    """Release the memory of a failed attempt, the device's own reserve included. Not inside an `except` block.

    An error that is being handled holds the attempt's tensors.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
