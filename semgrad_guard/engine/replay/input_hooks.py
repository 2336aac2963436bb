"""h^(l), the input of decoder layer l: hooks that expose it, and how a pass of the whole model verifies it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
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

    `layers` are the decoder layers, None where the architecture has no known list of them.
    """

    def __init__(self, layers: Sequence[nn.Module] | None, n_layers: int, span: Sequence[int]) -> None:
        self._layers, self._n_layers, self._span = layers, n_layers, span
        self._seen: dict[int, torch.Tensor] = {}
        self._calls = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the inputs of the span's layers (and the last one, by which the rest is verified)."""
        if self._layers is None:
            yield
            return

        watched = {*self._span, self._n_layers - 1}

        def keep(layer: int) -> InputHook:
            return lambda states: self._keep(layer, states)

        with input_hooks(self._layers, {layer: keep(layer) for layer in watched}):
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
