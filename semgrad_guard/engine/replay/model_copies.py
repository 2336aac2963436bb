"""Copies of a model: one that shares every weight and nothing else, and a sample of layers in a wider number format.

With the first, the user's model is never touched. The second serves a check that the model's own format's noise would
blur. Which way of replaying is exact depends on a model's code, not on its numbers. So a sample need not hold all
layers: one of each kind in the lower and in the upper half represents the rest, which return their inputs.

Why: docs/adr/0001-weight-sharing-copy.md
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from semgrad_guard.engine.replay.hooks import Bypass
from semgrad_guard.engine.replay.own_code import (
    ATOMS,
    attributes_of,
    innermost,
    is_container,
    is_holder,
    is_of_program,
    is_replaced,
)
from semgrad_guard.errors import UnsupportedModelError

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *FORWARD_HOOKS, *_BACKWARD_HOOKS)
_COMPILED = "_compiled_call_impl"
_ADDING = {list: list.append, set: set.add, deque: deque.append}

# Some rotary embeddings rewrite their frequencies in place on every forward pass: two threads must not share those.
_OWN_BUFFER_BYTES = 1 << 16

# Attributes by which a library's layer takes a kernel without autograd, as soon as a pass needs no gradient, and
# repacks its weights for it (bitsandbytes in four bits, on CPUs with bfloat16 units). A copy keeps to the other one.
_WITHOUT_AUTOGRAD = {"support_avx512bf16_for_cpu": False}

# RWKV divides weights in place in its first pass in evaluation mode, and notes here that it did.
_RESCALED = "layers_are_rescaled"


def weight_sharing_copy(model: nn.Module) -> nn.Module:
    """A structural copy in evaluation mode: shared weights, no parameter requiring a gradient, own hook tables.

    The user's forward hooks are kept (a steered model is scored as it answers), and so are bound methods, partials and
    objects in the place of a module's method: they work on the copy's modules. Functions are the user's own. Backward
    hooks are dropped, and compiled modules are taken as they were before `torch.compile`. No pass depends on those
    before it. Parameters are objects of
    their own over the same storage; containers and objects among a module's attributes are copies. Nothing that happens
    to the copy reaches the original.

    Raises:
        UnsupportedModelError: a library has repacked the weights in a way that no gradient can follow; the model has
            yet to change its own weights; a plain function replaces a method of one module, and would run the original.
    """
    return _Copier().module(model)


def is_own_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> bool:
    """Whether a copy has this buffer for itself: small scratch is copied, the buffers of a checkpoint are shared."""
    return buffer is not None and name in module._non_persistent_buffers_set and buffer.nbytes <= _OWN_BUFFER_BYTES


class _Copier:
    """Modules, parameters and values by their originals: one that is used in two places stays one."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._values: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that no number is given to another object meanwhile

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        compiled = module._modules.get("_orig_mod")
        source = module if compiled is None else compiled
        twin = object.__new__(type(source))
        self._modules[id(module)] = twin
        if compiled is not None and not any(getattr(module, table) for table in FORWARD_HOOKS):
            self._modules.setdefault(id(compiled), twin)
        self._fill(twin, source)
        # The hooks on a compiled module's wrapper: pre-hooks before its own, the others behind.
        for name in FORWARD_HOOKS if compiled is not None else ():
            outer, inner = self._hooks(getattr(module, name)), getattr(twin, name)
            first, then = (outer, inner) if "pre" in name else (inner, outer)
            vars(twin)[name] = both = type(inner)(first)
            both.update(then)
        return twin

    def _fill(self, twin: nn.Module, module: nn.Module) -> None:
        state = vars(twin)
        state["training"] = False
        for name in FORWARD_HOOKS:
            state[name] = self._hooks(getattr(module, name))
        for name in _BACKWARD_HOOKS:
            state[name] = type(getattr(module, name))()
        state["_parameters"] = {name: self._parameter(p) for name, p in module._parameters.items()}
        state["_buffers"] = {
            name: b.detach().clone() if b is not None and is_own_buffer(module, name, b) else b
            for name, b in module._buffers.items()
        }
        state["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        state["_modules"] = {n: None if child is None else self.module(child) for n, child in module._modules.items()}
        for name, value in vars(module).items():
            if name not in _OWN and name not in ("training", _COMPILED):
                _require_no_function(module, name, value)
                state[name] = self._parameter(value) if isinstance(value, nn.Parameter) else self._attribute(value)
        if "dynamic" in str(state.get("rope_type")):
            twin.register_forward_pre_hook(_as_loaded)
        state.update({name: value for name, value in _WITHOUT_AUTOGRAD.items() if name in state})
        if state.get(_RESCALED) is False:
            config: Any = module.config
            if 0 < config.rescale_every < config.num_hidden_layers:  # and the copy's weights are the user's
                raise UnsupportedModelError(
                    f"this {type(module).__name__} divides its weights in its first pass in evaluation mode, which is "
                    "its owner's to do. Run it once: model.eval(), then model(input_ids=...) under torch.no_grad()."
                )
            state[_RESCALED] = True  # they would be divided by one

    def _parameter(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Another object over the same storage.

        A library that gives a parameter new data in passing gives it to the copy's.
        """
        if parameter is None:
            return None
        if id(parameter) in self._parameters:
            return self._parameters[id(parameter)]
        attributes = {name: self._attribute(value) for name, value in vars(parameter).items()}
        if getattr(attributes.get("quant_state"), "packing_format_for_cpu", False):
            raise UnsupportedModelError(
                "bitsandbytes has repacked this model's weights for a CPU kernel that has no gradient, as it does in "
                "the first forward pass under torch.no_grad(). Load the model again, and let semgrad-guard generate "
                "and score with it before anything else runs it, or load it unquantized."
            )
        if type(parameter) is nn.Parameter or not issubclass(type(parameter), nn.Parameter):
            # (a tensor of a class of its own knows how to be detached)
            twin = nn.Parameter(parameter.detach(), requires_grad=False)
        else:
            plain = parameter.detach().as_subclass(torch.Tensor)
            twin: Any = torch.Tensor._make_subclass(type(parameter), plain, False)
        for name, value in attributes.items():
            vars(twin).setdefault(name, value)
        self._parameters[id(parameter)] = twin
        return twin

    def _hooks(self, table: Any) -> Any:
        """A table of the same kind. Hooks that hold a module hold the copy's; everything else in them is the user's."""
        twin = type(table)()
        for number, hook in table.items():
            twin[number] = self._hook(hook)
        return twin

    def _hook(self, value: Any) -> Any:
        value = innermost(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._hook(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self._hook(part) for name, part in value.keywords.items()}
            return partial(self._hook(value.func), *map(self._hook, value.args), **keywords)
        return value

    def _attribute(self, value: Any) -> Any:
        """A module's attribute in the copy: containers and objects are its own, and hold the copy's modules."""
        value = innermost(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self.module(target)) if isinstance(target, nn.Module) else value
        if type(value) in ATOMS or id(value) in self._values:
            return self._values.get(id(value), value)
        if is_container(value):
            return self._container(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._attribute(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self._attribute(part) for name, part in value.keywords.items()}
            twin = partial(self._attribute(value.func), *map(self._attribute, value.args), **keywords)
            vars(twin).update({name: self._attribute(part) for name, part in vars(value).items()})
            return twin
        return self._holder(value) if is_holder(value) else value

    def _note(self, value: Any, twin: Any) -> Any:
        self._originals.append(value)
        self._values[id(value)] = twin
        return twin

    def _container(self, value: Any) -> Any:
        if isinstance(value, (tuple, frozenset)):
            items = list(map(self._attribute, value))
            made = value._make(items) if hasattr(value, "_make") else type(value)(items)  # pyright: ignore
            return self._note(value, made)
        twin = self._note(value, _empty_like(value))
        if isinstance(value, dict):  # by the base's own methods: a subclass may check its entries
            put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
            for key, part in value.items():
                put(twin, key, self._attribute(part))
            return twin
        add: Any = next(add for kind, add in _ADDING.items() if isinstance(value, kind))
        for part in value:
            add(twin, self._attribute(part))
        return twin

    def _holder(self, value: Any) -> Any:
        try:
            twin = object.__new__(type(value))
        except TypeError:  # made by an extension: its state is not ours to copy
            return self._note(value, value)
        self._note(value, twin)
        for name, part in attributes_of(value).items():
            object.__setattr__(twin, name, self._attribute(part))
        return twin


def _as_loaded(rotary: nn.Module, _: Any) -> None:
    """Frequencies that follow the length begin each pass as they were loaded, whatever passes came before.

    transformers keeps those of the longest sequence until one is shorter than the original context.
    """
    held: Any = {**rotary._buffers, **vars(rotary)}
    for name in [name for name in held if name.endswith("original_inv_freq")]:
        rotary._buffers[name.replace("original_inv_freq", "inv_freq")] = held[name].clone()
    for name in [name for name in held if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, held["original_max_seq_len"])


def _require_no_function(module: nn.Module, name: str, value: Any) -> None:
    """Return unless a function of the user's program replaces a method of this module.

    Raises:
        UnsupportedModelError: it does.
    """
    plain = innermost(value)
    if isinstance(plain, FunctionType) and is_of_program(plain) and is_replaced(module, name, plain):
        kind = type(module).__name__
        raise UnsupportedModelError(
            f"{kind}.{name} was replaced on one object by the function {plain.__qualname__}, which would run that very "
            f"{kind} and not the copy that is scored. Bind the function to the module, "
            f"module.{name} = types.MethodType(function, module), or use a forward hook, or load the model again."
        )


def _empty_like(value: Any) -> Any:
    """An empty container of the same kind, with the same attributes, default and bound."""
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    kind: Any = type(value)
    twin = kind.__new__(kind)
    if hasattr(value, "__dict__"):
        vars(twin).update(vars(value))
    if isinstance(value, defaultdict):
        twin.default_factory = value.default_factory
    return twin


_ALL_BYTES = 256 << 20  # in the wider format, up to which every layer is taken
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""The format in which a format's own rounding does not show."""


def float_sample(
    model: nn.Module, layers_path: str, first: int, wider: torch.dtype, *, returns_tuples: bool
) -> nn.Module:
    """A copy of `model` in `wider` that shares the tensors that are as wide already, for replays from layer `first` on.

    Linear maps with quantized weights are replaced by plain ones of their shape with random weights: the check is of
    the code around the layers, not of their numbers.
    """
    twin = weight_sharing_copy(model)
    layers = cast(nn.ModuleList, twin.get_submodule(layers_path))
    if sum(p.numel() for p in twin.parameters()) * wider.itemsize > _ALL_BYTES:
        # The first layer of each kind below `first`, the first and the last of each from there on.
        kinds: dict[tuple[bool, Hashable], list[int]] = {}
        for index, layer in enumerate(layers):
            kinds.setdefault((index < first, _kind(layer)), []).append(index)
        kept = {place for (below, _), places in kinds.items() for place in (places[0], places[0 if below else -1])}
        for index, layer in enumerate(layers):
            if index not in kept:
                layers[index] = Bypass.of(layer, returns_tuple=returns_tuples)
    _widen(twin, wider, {}, torch.Generator().manual_seed(0))
    return twin


def _kind(layer: nn.Module) -> Hashable:
    """The traits of a layer: the types of their modules, the shapes of their weights, and plain settings."""
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and "idx" not in name)
    ]
    shapes = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    windows = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return (*(type(module) for module in layer.modules()), *settings, *shapes, *windows)


def _widen(module: nn.Module, wider: torch.dtype, done: dict[int, Any], generator: torch.Generator) -> None:
    """Turn a copy's tensors into `wider`, in place of the copy's references alone. Layers left out stay as they are."""
    if isinstance(module, Bypass) or id(module) in done:
        return
    done[id(module)] = module
    for name, parameter in module._parameters.items():
        if parameter is not None and _is_narrower(parameter, wider):
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.detach().to(wider), requires_grad=False)
            module._parameters[name] = done[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None and _is_narrower(buffer, wider):
            module._buffers[name] = buffer.detach().to(wider)
    for name, child in module._modules.items():
        if child is None:
            continue
        if plain := _plain_map(child, wider, generator):
            module._modules[name] = plain
        else:
            _widen(child, wider, done, generator)


def _is_narrower(tensor: torch.Tensor, wider: torch.dtype) -> bool:
    return tensor.dtype in WIDER and tensor.dtype.itemsize < wider.itemsize


def _plain_map(quantized: nn.Module, wider: torch.dtype, generator: torch.Generator) -> nn.Linear | None:
    """A linear map in the place of a quantized one; None where the module is not such a one."""
    own = [tensor for tensor in (*quantized._parameters.values(), *quantized._buffers.values()) if tensor is not None]
    is_plain = all(type(tensor.data) is torch.Tensor and tensor.is_floating_point() for tensor in own)
    if is_plain or not (hasattr(quantized, "in_features") and hasattr(quantized, "out_features")):
        return None
    inputs, outputs = int(cast(Any, quantized.in_features)), int(cast(Any, quantized.out_features))
    device = next(chain(quantized.parameters(), quantized.buffers())).device
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    plain.weight = nn.Parameter(weight.to(device, wider), requires_grad=False)
    return plain
