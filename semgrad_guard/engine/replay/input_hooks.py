"""h^(l), the input of decoder layer l: hooks that expose it, and how a pass of the whole model verifies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.errors import UnsupportedModelError

InputHook = Callable[[torch.Tensor], torch.Tensor | None]


def add_input_hook(layer: nn.Module, watch: InputHook) -> Any:
    """Call `watch` with the layer's input hidden states [batch, positions, d]; what it returns replaces them."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        changed = watch(cast(torch.Tensor, args[0] if args else kwargs["hidden_states"]))
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed}

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def input_hooks(layers: Sequence[nn.Module] | nn.ModuleList, table: Mapping[int, InputHook]) -> Iterator[None]:
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
    states = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
    if stop and states is not None and states.requires_grad:
        states.register_hook(lambda _: stop.check())  # a backward pass may run in a thread without this context


class LayerInputs:
    """h^(l) of a span in one pass over the model's own code, from what its decoder layers receive.

    `layers` are the decoder layers, None where the architecture has no known list of them.
    """

    def __init__(self, layers: nn.ModuleList | None, n_layers: int, span: Sequence[int]) -> None:
        self._layers, self._n_layers, self._span = layers, n_layers, span
        self._seen: dict[int, torch.Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the span's layers receive (and the last one, by which the rest is verified)."""
        if self._layers is None:
            yield
            return

        def keep(layer: int) -> InputHook:
            return lambda states: self._seen.__setitem__(layer, states)

        with input_hooks(self._layers, {layer: keep(layer) for layer in {*self._span, self._n_layers - 1}}):
            yield

    def verified(self, recorded: Sequence[torch.Tensor] | None, model: str) -> tuple[torch.Tensor, ...]:
        """h^(l) as the decoder layers received it, verified by the model's own record; else from that record.

        (Some models, Mamba for one, record the layers' outputs without the embedding: their numbering is off by one.)

        Raises:
            UnsupportedModelError: which recorded state belongs to which layer of this kind of `model` is not known.
        """
        record = recorded or ()
        beyond_embedding = [states for layer, states in self._seen.items() if layer]
        if beyond_embedding and all(any(states is other for other in record) for states in beyond_embedding):
            return tuple(self._seen[layer] for layer in self._span)
        if len(record) != self._n_layers + 1:
            raise UnsupportedModelError(
                f"{model} reports {len(record)} hidden states for its {self._n_layers} decoder layers; which one "
                "belongs to which layer is not known"
            )
        return tuple(record[layer] for layer in self._span)
