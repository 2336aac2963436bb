"""How to generate, and the logits processors that make a greedy search sample, with randomness of its own."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from semgrad_guard.declared import require_valid
from semgrad_guard.errors import require_known
from semgrad_guard.settings import AnswerOptions

T = TypeVar("T")


def knows_its_options(kind: type[T]) -> type[T]:
    """For a class: an unknown keyword is an `InputError` that names the known ones."""
    initialize: Any = kind.__init__
    known = [name for name in signature(kind).parameters if name != "self"]

    @wraps(initialize)
    def checked(self: T, *args: Any, **options: Any) -> None:
        require_known(type(self).__name__, options, known)
        initialize(self, *args, **options)

    setattr(kind, "__init__", checked)  # noqa: B010 - a type checker keeps to the signature that it has read
    return kind


@knows_its_options
@dataclass(frozen=True, kw_only=True)
class GenerationOptions(AnswerOptions):
    """How to generate. Greedy by default, as in the paper; a model's own sampling defaults play no part.

    `max_tokens` >= 1; `temperature` from 1e-6 to 100, or 0, which is greedy; `top_p` in (0, 1]; `top_k` >= 0, where 0
    means all; `seed` repeats a sampled answer (row i of a batch draws from seed + i); `stop` strings end an answer
    before themselves; `grammar` (Lark, as llguidance reads it) is the form that an answer must follow. Scores always
    use the raw, untempered and unconstrained distribution.

    Raises:
        InputError: one is out of its range.
    """

    grammar: str | None = None

    def __post_init__(self) -> None:
        require_valid(self)

    def processors(self, rows: int) -> LogitsProcessorList:
        """The logits processors that turn a greedy search into this sampling; none where it is greedy already."""
        if self.temperature == 0:
            return LogitsProcessorList()
        seed = secrets.randbits(31) if self.seed is None else self.seed
        return sampling_processors(
            range(seed, seed + rows), temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )


def sampling_processors(
    seeds: Sequence[int], *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> LogitsProcessorList:
    """Processors that make the likeliest token a sample; row i draws from `seeds[i]`."""
    chain: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    return LogitsProcessorList([*chain, Draw(seeds)])


class Draw(LogitsProcessor):
    """Leaves one token a row, drawn from softmax(logits): where a uniform number falls among the summed probabilities.

    The numbers come from generators of our own, one per row, so that the caller's random state is never read or moved,
    concurrent generations do not disturb each other, and a row does not depend on its batch. They live where the
    scores do: a seed repeats an answer on the same kind of device.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = tuple(seeds)
        self._generators: list[torch.Generator] = []
        self._sums = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if not self._generators:
            self._generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds]
            # Kept from step to step: to get and clear these megabytes anew takes several times as long as to fill them.
            self._sums = torch.empty_like(scores, dtype=torch.float64)
        uniform = torch.stack(
            [
                torch.rand(1, generator=generator, dtype=torch.float64, device=scores.device)
                for generator in self._generators
            ]
        )
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()  # in place: the temperature has made them anew
        sums = torch.cumsum(weights, -1, dtype=torch.float64, out=self._sums)
        drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
        drawn.clamp_(max=scores.shape[-1] - 1)  # a number that was rounded up to the whole sum
        return scores.fill_(-math.inf).scatter_(1, drawn, 0.0)
