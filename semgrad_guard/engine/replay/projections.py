"""The linear maps of a copy's decoder layers: their outputs while generating spare reading their weights again.

A replay needs the outputs of every linear map of the upper layers, and its generation has just computed them, position
by position. Kept, they leave attention, norms and activations to be run again, which read no weights; the graph is the
same, and its backward pass reads the weights once. Inside `replaying`, maps whose outputs were not kept take the faster
order for few rows. Generation stays outside, so that answers are bit for bit the user's model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from semgrad_guard.engine.models.architecture import has_plain_weight
from semgrad_guard.engine.replay.skinny_linear import input_gradient, linear_map

Place = tuple[int, str]
"""A linear map by its decoder layer's number and its path in there."""

Outputs = Mapping[Place, torch.Tensor]
"""The outputs of linear maps: [B, positions, out] each."""


class Projections:
    """All plain linear maps of some decoder layers. Not re-entrant: callers hold the engine's lock."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._replaying = False
        self._known: Outputs = {}
        self.copies = False  # whether known outputs are copied: code may change them in place
        self._listener: Callable[[Place, torch.Tensor], None] | None = None
        for number, layer in enumerate(layers):
            for path, linear in layer.named_modules():
                if type(linear) is nn.Linear and has_plain_weight(linear) and "forward" not in vars(linear):
                    vars(linear)["forward"] = partial(self._forward, linear, (number, path))

    @contextmanager
    def replaying(self, known: Outputs | None = None) -> Iterator[None]:
        """For the time of a block: the faster ways, and `known` outputs instead of products where shapes agree."""
        before = self._replaying, self._known
        self._replaying, self._known = True, known or {}
        try:
            yield
        finally:
            self._replaying, self._known = before

    @contextmanager
    def listening(self, listener: Callable[[Place, torch.Tensor], None]) -> Iterator[None]:
        """For the time of a block, hand the listener the output of every linear map."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _forward(self, linear: nn.Linear, place: Place, states: torch.Tensor) -> torch.Tensor:
        if self._replaying:
            known = self._known.get(place)
            if known is None or known.shape[:-1] != states.shape[:-1]:
                return linear_map(linear, states)
            output: Any = _Known.apply(states, linear.weight, known, self.copies)
            return output
        given = F.linear(states, linear.weight, linear.bias)
        if self._listener is not None:
            self._listener(place, given)
        return given


class _Known(torch.autograd.Function):
    """An output that is known, with the gradient that the product would have sent to its input."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, copies: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return output.clone() if copies else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        by_states = input_gradient(gradient.reshape(-1, gradient.shape[-1]), weight)
        return by_states.view(*gradient.shape[:-1], -1), None, None, None
