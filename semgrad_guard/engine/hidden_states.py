"""Hooks that expose h^(l), the input of decoder layer l: to keep it while generating, to differentiate by it after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

Tap = Callable[[torch.Tensor], torch.Tensor | None]


def tap_input(layer: nn.Module, tap: Tap) -> Any:
    """Call `tap` with the layer's input hidden states [batch, positions, d]; what it returns replaces them."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        changed = tap(cast(torch.Tensor, args[0] if args else kwargs["hidden_states"]))
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed}

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def taps(layers: Sequence[nn.Module] | nn.ModuleList, table: Mapping[int, Tap]) -> Iterator[None]:
    """Tap several layers for the time of a block; every hook is gone afterwards, whatever happened inside."""
    with ExitStack() as stack:
        for index, tap in table.items():
            stack.callback(tap_input(layers[index], tap).remove)
        yield


_EXACT = (torch.float32, torch.float64)


class Capture:
    """Keeps h^(k) at positions >= `start` while a model generates (prefill in any number of pieces, then tokens).

    It also keeps the head's output at every step, which spares scoring a pass through the head, as long as all of it
    stays within `logit_bytes`. In half precision it does not: at logits of 16 to 32 a bfloat16 is rounded to an eighth.
    """

    def __init__(self, layer: int, start: int, *, logit_bytes: int = 0) -> None:
        self.layer = layer
        self._logit_bytes = logit_bytes
        self._start = start
        self._seen = 0
        self._pieces: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] | None = []

    def __call__(self, hidden: torch.Tensor) -> None:
        first = max(0, self._start - self._seen)
        self._seen += hidden.shape[1]
        if first < hidden.shape[1]:
            # The prefill's slice is copied: a view would keep the whole prompt's states alive.
            self._pieces.append(hidden[:, first:].detach().clone() if first else hidden.detach())

    def see_logits(self, raw: torch.Tensor) -> None:
        """Take in the head's output [batch, positions, V] of one step, of which the last position counts."""
        if self._steps is None:
            return
        last = raw[:, -1].detach()
        if raw.dtype not in _EXACT or (len(self._steps) + 1) * last.numel() * last.itemsize > self._logit_bytes:
            self._steps = None
            return
        self._steps.append(last.clone() if raw.shape[1] > 1 else last)

    def states(self) -> torch.Tensor:
        """h^(k) at every position from `start` on: [batch, positions, d]."""
        return torch.cat(self._pieces, dim=1)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """The head's output [batch, V] at every step; empty where not all of it was kept."""
        return tuple(self._steps or ())


@contextmanager
def capturing(layers: Sequence[nn.Module], capture: Capture) -> Iterator[None]:
    """Let `capture` see the inputs of its layer for the time of a block."""
    with taps(layers, {capture.layer: capture}):
        yield
