"""Modules that take the place of others in a weight-sharing copy, so that a replay skips needless work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.models.architecture import Architecture, submodule_setter


class HeadRecorder(nn.Module):
    """Takes the head's place: keeps its input and answers with one zero per position, at no cost."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = (head,)  # not a module of this one
        self._inputs: list[torch.Tensor] = []

    @property
    def weight(self) -> torch.Tensor:
        """The head's: some models read its dtype."""
        return self._head[0].weight

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

    A substitute rather than a shorter list: model code indexes masks, rotary tables and caches by the layer's number.
    """

    @classmethod
    def of(cls, layer: nn.Module, *, returns_tuple: bool) -> Bypass:
        twin = cls()
        hooks = {name: value for name, value in vars(twin).items() if "hook" in name}
        vars(twin).update(vars(layer))
        vars(twin).update(hooks, returns_tuple=returns_tuple)
        vars(twin).pop("forward", None)  # one that the user has patched on
        return twin

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self.returns_tuple else hidden_states


class ModuleSwaps:
    """Replaces the head and the lower layers of a copy for the time of a block; they are put back whatever happens."""

    def __init__(self, model_copy: nn.Module, architecture: Architecture) -> None:
        self._copy, self._architecture = model_copy, architecture
        self._head = model_copy.get_submodule(architecture.head)
        self._head.register_forward_pre_hook(restride)
        self._put_head = submodule_setter(model_copy, architecture.head)
        self._recorder = HeadRecorder(cast(nn.Linear, self._head))
        self._returns_tuple: bool | None = None

    @property
    def head(self) -> nn.Linear:
        """The output head, its weight not requiring a gradient."""
        return cast(nn.Linear, self._head)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers that text passes through (only where the architecture has a known list of them)."""
        members = self._members
        return [members[place] for place in self._places]

    @property
    def _members(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self._copy.get_submodule(cast(str, self._architecture.layers)))

    @property
    def _places(self) -> Sequence[int]:
        """The decoder layers' places in their list."""
        return [place for place in range(len(self._members)) if place not in self._architecture.idle]

    @contextmanager
    def headless(self) -> Iterator[HeadRecorder]:
        """No head: the recorder in its place takes its input."""
        self._put_head(self._recorder)
        try:
            yield self._recorder
        finally:
            self._put_head(self._head)

    @contextmanager
    def with_a_weight_of_its_own(self) -> Iterator[torch.Tensor]:
        """For the time of a block the head's weight takes part in graphs, and no other use of it (embeddings) does."""
        parameters = self._head._parameters
        shared = parameters["weight"]
        own = parameters["weight"] = nn.Parameter(cast(torch.Tensor, shared).detach(), requires_grad=True)
        try:
            yield own
        finally:
            parameters["weight"] = shared

    @contextmanager
    def bypassing(self, count: int) -> Iterator[None]:
        """The first `count` decoder layers return their inputs."""
        members = self._members
        lower = [(place, members[place]) for place in self._places[:count]]
        for place, layer in lower:
            members[place] = Bypass.of(layer, returns_tuple=self.layers_return_tuples())
        try:
            yield
        finally:
            for place, layer in lower:
                members[place] = layer

    def layers_return_tuples(self) -> bool:
        """Whether a decoder layer answers with a tuple; seen once on a single token."""
        if self._returns_tuple is None:
            seen: list[bool] = []
            hook = self.layers[0].register_forward_hook(lambda *call: seen.append(isinstance(call[2], tuple)))
            try:
                with torch.no_grad(), self.headless() as recorder:
                    token = torch.zeros(1, 1, dtype=torch.long, device=self.head.weight.device)
                    # with its mask: without one, transformers warns of padding where the token is the padding's
                    self._copy(input_ids=token, attention_mask=torch.ones_like(token))
                    recorder.take()
            finally:
                hook.remove()
            self._returns_tuple = seen[0]
        return self._returns_tuple
