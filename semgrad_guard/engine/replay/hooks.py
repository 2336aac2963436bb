"""Hooks on the layers of a copy, and modules that take the place of others in it.

h^(l) is the input of decoder layer l: hooks expose it, and a pass of the whole model verifies it. Substitutes for the
head and for lower layers let a replay skip needless work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.models.architecture import Architecture
from semgrad_guard.errors import UnsupportedModelError

InputHook = Callable[[torch.Tensor], torch.Tensor | None]


def add_input_hook(layer: nn.Module, watch: InputHook) -> Any:
    """Call `watch` with the layer's input hidden states [batch, positions, d]; its result replaces them."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        changed = watch(cast(torch.Tensor, args[0] if args else kwargs["hidden_states"]))
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed}

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def input_hooks(layers: Sequence[nn.Module], table: Mapping[int, InputHook]) -> Iterator[None]:
    """Hook the inputs of several layers for the time of a block; the hooks are removed whatever happens inside."""
    with ExitStack() as stack:
        for index, watch in table.items():
            stack.callback(add_input_hook(layers[index], watch).remove)
        yield


@contextmanager
def stoppable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """For the time of a block the current stop is checked before each module, and before its part of a backward pass.

    Where no stop is set nothing is added, so that an ordinary run pays nothing.
    """
    stop = current_stop()
    stop.check()
    with ExitStack() as stack:
        for module in modules if stop else ():
            stack.callback(module.register_forward_pre_hook(_check, with_kwargs=True).remove)
        yield


def _check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stop = current_stop()  # the one of the running thread: another may use the same module
    stop.check()
    states = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)), None)
    if stop and states is not None and states.requires_grad:
        states.register_hook(lambda _: stop.check())  # a backward pass may run in a thread without this context


class LayerInputs:
    """h^(l) of a span in one pass over the model's own code, from the inputs of its decoder layers.

    `layers` are the decoder layers, none where the architecture has no known list of them.
    """

    def __init__(self, layers: Sequence[nn.Module], n_layers: int, span: Sequence[int]) -> None:
        self._layers, self._n_layers, self._span = layers, n_layers, span
        self._seen: dict[int, torch.Tensor] = {}
        self._calls = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the inputs of the span's layers (and the last one, by which the rest is verified)."""
        if not self._layers:
            yield
            return
        watched = {*self._span, self._n_layers - 1}
        with input_hooks(self._layers, {layer: partial(self._keep, layer) for layer in watched}):
            yield
        if self._calls > len(self._seen):
            raise UnsupportedModelError(
                "this model runs its decoder layers several times over, so that a layer has no single hidden state to "
                "differentiate by. Use a model that runs each layer once."
            )

    def _keep(self, layer: int, states: torch.Tensor) -> None:
        self._seen[layer] = states
        self._calls += 1

    def verified(
        self, recorded: Sequence[torch.Tensor] | None, model: str, columns: Collection[int]
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """h^(l) as the decoder layers received it, verified by the model's own record; and which axis counts tokens.

        Where the record holds other tensors, it is taken instead, if it has one for each layer. (Some models, Mamba for
        one, record the layers' outputs without the embedding: their numbering is off by one.)

        Args:
            recorded: the model's `hidden_states`.
            model: its name, for errors.
            columns: how many tokens each row may have.

        Raises:
            UnsupportedModelError: which recorded state belongs to which layer or token is not known.
        """
        states = self._states(recorded or (), model)
        axes = {_token_axis(state, columns) for state in states}
        if len(axes) > 1 or None in axes:
            raise UnsupportedModelError(
                f"{model} has hidden states of shape {tuple(states[0].shape)} for {min(columns)} tokens; which of them "
                "belong to which token is not known. Use a model whose layers pass on one state for each token."
            )
        (axis,) = axes
        return states, cast(int, axis)

    def _states(self, record: Sequence[torch.Tensor], model: str) -> tuple[torch.Tensor, ...]:
        beyond_embedding = [states for layer, states in self._seen.items() if layer]
        if beyond_embedding and all(_is_shown(states, record) for states in beyond_embedding):
            return tuple(self._seen[layer] for layer in self._span)
        if len(record) != self._n_layers + 1:
            raise UnsupportedModelError(
                f"{model} reports {len(record)} hidden states for its {self._n_layers} decoder layers; which one "
                "belongs to which layer is not known. Use a model that runs every layer of its stack on text."
            )
        return tuple(record[layer] for layer in self._span)


def _is_shown(states: torch.Tensor, record: Sequence[torch.Tensor]) -> bool:
    """Whether a record of hidden states holds these, or a copy with batch and tokens exchanged."""
    if any(states is other for other in record):
        return True
    turned = states.transpose(0, 1)
    return any(turned.shape == other.shape != states.shape and torch.equal(turned, other) for other in record)


def _token_axis(states: torch.Tensor, columns: Collection[int]) -> int | None:
    """The axis that counts tokens; None where several could, or none.

    Usually states are [B, tokens, d], seldom [tokens, B, d]. A model with several residual streams has
    [B, tokens, streams, d] or [streams, B, tokens, d].
    """
    if states.ndim == 3:
        return next((axis for axis in (1, 0) if states.shape[axis] in columns), None)
    axes = [axis for axis in (1, 2) if states.shape[axis - 1] not in columns and states.shape[axis] in columns]
    return axes[0] if states.ndim == 4 and len(axes) == 1 else None


def by_token(states: torch.Tensor, token_axis: int) -> torch.Tensor:
    """States or their gradients as [B, tokens, width], all residual streams of a token side by side."""
    if states.ndim == 3:
        return states if token_axis == 1 else states.transpose(0, 1)
    return states.movedim((token_axis - 1, token_axis), (0, 1)).flatten(2)


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
        parent, _, self._head_name = architecture.head.rpartition(".")
        self._head_parent = model_copy.get_submodule(parent)
        self._recorder = HeadRecorder(cast(nn.Linear, self._head))
        self._returns_tuple: bool | None = None

    @property
    def head(self) -> nn.Linear:
        """The output head, its weight not requiring a gradient."""
        return cast(nn.Linear, self._head)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers that text passes through; none where the architecture has no known list of them."""
        members = self._members
        return [members[place] for place in self._places]

    @property
    def _members(self) -> nn.ModuleList:
        path = self._architecture.layers
        return nn.ModuleList() if path is None else cast(nn.ModuleList, self._copy.get_submodule(path))

    @property
    def _places(self) -> Sequence[int]:
        """The decoder layers' places in their list."""
        return [place for place in range(len(self._members)) if place not in self._architecture.idle]

    @contextmanager
    def headless(self) -> Iterator[HeadRecorder]:
        """No head: the recorder in its place takes its input."""
        setattr(self._head_parent, self._head_name, self._recorder)
        try:
            yield self._recorder
        finally:
            setattr(self._head_parent, self._head_name, self._head)

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
