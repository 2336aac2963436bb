"""How much may be held besides the model, and what happens where memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes. Beyond them scores cost time instead; they stay the same, but for roundings of half precision.

    `logits`: the head's outputs that writing keeps, and those kept between the two passes over the vocabulary; beyond
    it they are computed again.
    `activations`: the states kept for a replay's backward pass; beyond it only every decoder layer's input is kept, and
    the layer is run once more (about a forward pass of the upper layers).
    `outputs`: the outputs of the upper layers' linear maps while writing; those beyond it are computed again.
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


def as_memory_allows(work: Callable[[Sequence[R]], Sequence[T]], rows: Sequence[R]) -> list[T | None]:
    """The results of `work` for rows together; where memory runs out one by one, and None for one without room."""
    found = unless_memory_runs_out(lambda: work(rows))
    if found is not None:
        return list(found)
    return [None] if len(rows) == 1 else [one for row in rows for one in as_memory_allows(work, [row])]


def give_back_memory() -> None:
    """Release the memory of a failed attempt, the device's own reserve included. Not inside an `except` block.

    An error that is being handled holds the attempt's tensors.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
