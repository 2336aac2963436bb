"""How much may be held in addition to the model, and how scoring proceeds where that is too little."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes. Beyond them scores cost time instead; they stay the same, but for roundings of half precision.

    `logits`: the head's outputs that a generation keeps, and those kept between the two passes over the vocabulary;
    beyond it they are computed again for gradients, and surveyed while generating for scores without one.
    `activations`: the states kept for a replay's backward pass; beyond it only every decoder layer's input is kept, and
    the layer is run once more (about a forward pass of the upper layers).
    `outputs`: the outputs of the upper layers' linear maps while generating; those beyond it are computed again.

    `prompts`: keys and values kept from one generation to the next, so that the next turn of a chat, or another prompt
    with the same instructions, is read only from where it differs. 0 (the default) keeps none: then nothing is held
    between calls, and no answer's last digits depend on earlier requests. Batches of one prompt alone use it.
    """

    logits: int = 96 << 20
    activations: int = 512 << 20
    outputs: int = 96 << 20
    prompts: int = 0


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


def activation_bytes(layers: Sequence[nn.Module], positions: int) -> int:
    """About the bytes that a backward pass through `layers` keeps: inputs and outputs of matrices, by position."""
    matrices = [p for layer in layers for p in layer.parameters() if p.ndim >= 2]
    return sum((p.shape[-1] + p.shape[-2]) * p.dtype.itemsize for p in matrices) * positions


@contextmanager
def checkpointed(layers: Sequence[nn.Module], again: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """For the time of a block `layers`, which must be a copy's, keep nothing but their inputs.

    `again` is entered when a layer is run for the second time, so that it computes the same as at first.
    """
    with ExitStack() as stack:
        for layer in layers:
            patched = {"forward": vars(layer)["forward"]} if "forward" in vars(layer) else {}
            stack.callback(vars(layer).update, patched)
            stack.callback(vars(layer).pop, "forward")
            vars(layer)["forward"] = _Checkpoint(layer.forward, again)
        yield


class _Checkpoint:
    """A forward method of which only the inputs are kept."""

    def __init__(self, forward: Callable[..., Any], again: Callable[[], AbstractContextManager[None]]) -> None:
        self._forward, self._again = forward, again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation mode draws no random numbers; the caller's generators are left alone.
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self._again():
            return self._forward(*args, **kwargs)
