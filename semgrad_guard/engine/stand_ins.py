"""What takes the place of a module in a shadow, so that a replay skips what it does not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class HeadTap(nn.Module):
    """Takes the head's place: keeps its input and answers with one zero per position, at no cost."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[torch.Tensor] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self._inputs.append(states)
        return states.new_zeros(*states.shape[:-1], 1)

    def take(self) -> torch.Tensor:
        """The last pass's final states; forgotten here, so that no graph outlives its scoring."""
        states = self._inputs[-1]
        self._inputs.clear()
        return states


def restride(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same states without the strides of the longer tensor they were sliced from.

    For a sliced 3-D input, `linear` on a CPU copies the whole weight (unless that requires a gradient).
    """
    states, *rest = args
    return (states.contiguous().view(-1, states.shape[-1]).view(states.shape), *rest)


class Bypass(nn.Module):
    """Takes a decoder layer's place with all its attributes and hands the hidden states on as they came.

    A stand-in rather than a shorter list: model code indexes masks, rotary tables and caches by the layer's number.
    """

    @classmethod
    def of(cls, layer: nn.Module, *, returns_tuple: bool) -> Bypass:
        twin = cls()
        hooks = {name: value for name, value in vars(twin).items() if "hook" in name}
        vars(twin).update(vars(layer))
        vars(twin).update(hooks, returns_tuple=returns_tuple)
        return twin

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self.returns_tuple else hidden_states
