"""What a model is made of at one moment, so that whatever its owner changes is seen at the next call.

A model's behaviour is its modules' attributes: weights and buffers, children, hooks, patched methods, flags, settings.
A snapshot notes all of them. Asking whether they are still the same takes one walk over the same dictionaries, without
Python code for each entry; only where something differs is the model read anew and compared as a whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from semgrad_guard.engine.replay.held_values import (
    ATOMS,
    LIBRARIES,
    held_by,
    innermost,
    is_container,
    is_holder,
    names_in,
    package_of,
    reached_from,
    slots_of,
)
from semgrad_guard.engine.replay.watching import (
    Contents,
    Entries,
    has_storage,
    layout_of,
    layouts_of,
    version_of,
)
from semgrad_guard.engine.replay.weight_sharing_copy import is_own_buffer

# transformers leaves these on a model at its first `output_hidden_states=True`; they do nothing of themselves.
_INERT_HOOKS = "transformers.utils.output_capturing"
_FORWARD_ONLY = "make_inputs_require_grads"  # a hook that asks for gradients and changes no number
HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
_TABLES = ("_parameters", "_buffers", "_modules")
NO_MATTER = frozenset(
    {
        "training",  # every pass is in evaluation mode
        "_compiled_call_impl",  # computes what it was compiled from
        "_output_capturing_hooks_installed",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_is_full_backward_hook",
        "_non_persistent_buffers_set",
        *(name for name in vars(nn.Module()) if "state_dict" in name),
        *chain.from_iterable(HOOKS.values()),
    }
)
_BY_VALUE = ATOMS | {MethodType}
_CALLABLES = (FunctionType, MethodType, partial)


def is_inert(hook: object) -> bool:
    """Whether a forward hook changes no number of a forward pass."""
    return getattr(hook, "__module__", None) == _INERT_HOOKS or getattr(hook, "__name__", "") == _FORWARD_ONLY


class Snapshot:
    """A model's parts at one moment. It holds them, so that no other object can take their place unnoticed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._model_id = weakref.ref(model), id(model)
        self.holds_the_model = False
        """Whether the model is reached from its own parts: then it lives as long as this snapshot."""
        self._leaves: list[Any] = []
        self._seen: set[int] = set()
        self._modules: list[nn.Module] = []
        self._chosen: list[tuple[Mapping[str, Any], list[str]]] = []  # what modules and their classes hold by name
        self._tables: list[Mapping[Any, Any]] = []  # and what its tables, its containers and its objects hold
        self._named: list[Mapping[Any, Any]] = []  # those of them whose keys may change while their values do not
        self._sequences: list[Iterable[Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._callables: list[Any] = []
        self._visit_module(model)
        self._visit_surroundings()
        self._visit_modules_of_callables()
        self._entries = Entries(self._chosen, self._tables, self._named)
        self._items = [list(sequence) for sequence in self._sequences]
        self._classes = list(map(type, self._all_modules()))
        self._plain = [tensor for tensor in self._tensors if has_storage(tensor)]
        self._layouts = layouts_of(self._plain)
        self._buffers = Contents(list(self._own_buffers()), whole=True)
        self._leaves += self._buffers.as_bytes()
        self.weights = Contents(self._plain)
        self._live = self._live_leaves()

    @property
    def tensors(self) -> frozenset[int]:
        """The numbers of all tensors that it holds."""
        return frozenset(map(id, self._tensors))

    def is_current(self) -> bool:
        """Whether the model still is what it was, its shared weights' numbers aside (see `weights`)."""
        return (
            self._entries.are_the_same()
            and list(map(type, self._all_modules())) == self._classes
            and layouts_of(self._plain) == self._layouts
            and all(_same(list(s), items) for s, items in zip(self._sequences, self._items, strict=True))
            and not self._buffers.have_changed()
            and (not self._callables or _same(self._live_leaves(), self._live))
        )

    def agrees_with(self, other: Snapshot) -> bool:
        """Whether both say the same of the model, down to every attribute that can matter."""
        return _same(self._leaves, other._leaves) and _same(self._live, other._live)

    def catch_up(self) -> None:
        """Take what functions hold now (a counter, a list of records) for what they held: our own pass changed it."""
        if self._callables:
            self._live = self._live_leaves()

    # The walk.

    def _visit(self, value: Any) -> None:
        value = innermost(value)
        self._leaves.append(type(value) if is_container(value) else value)
        if type(value) in ATOMS:
            return
        if id(value) == self._model_id:
            self.holds_the_model = True
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, torch.Tensor):
            self._visit_tensor(value)
        elif is_container(value):
            self._visit_container(value)
        elif is_holder(value):
            self._visit_holder(value)
        elif isinstance(value, _CALLABLES) and held_by(value):
            self._callables.append(value)

    def _visit_module(self, module: nn.Module) -> None:
        self._seen.add(id(module))
        if id(module) != self._model_id:
            self._modules.append(module)
        self._leaves.append(type(module))
        self._chosen.append((vars(module), [name for name in vars(module) if name not in NO_MATTER]))
        for name, value in list(vars(module).items()):
            if name in _TABLES:
                self._visit_table(value)
            elif name in HOOKS:
                self._tables.append(value)
                self._visit_hooks(value, [getattr(module, flags) for flags in HOOKS[name]])
            elif name not in NO_MATTER:
                self._leaves.append(name)
                self._visit(value)

    def _visit_hooks(self, hooks: Mapping[int, Any], flags: Sequence[Mapping[int, Any]]) -> None:
        for number, hook in hooks.items():
            if getattr(hook, "__module__", None) != _INERT_HOOKS:
                self._leaves += [number in table for table in flags]
                self._visit(hook)

    def _visit_table(self, table: Mapping[Any, Any]) -> None:
        self._tables.append(table)
        self._named.append(table)
        self._leaves += [len(table), *table]
        for value in list(table.values()):
            self._visit(value)

    def _visit_container(self, container: Any) -> None:
        if isinstance(container, dict):
            self._visit_table(container)
            return
        if not isinstance(container, tuple):
            self._sequences.append(container)
        self._leaves.append(len(container))
        for value in list(container):
            self._visit(value)

    def _visit_holder(self, holder: Any) -> None:
        if hasattr(holder, "__dict__"):
            self._visit_table(vars(holder))
        if slots := _Slots(holder):
            self._sequences.append(slots)
            for value in slots:
                self._visit(value)

    def _visit_tensor(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)
        self._leaves += layout_of(tensor)
        if vars(tensor):
            self._visit_table(vars(tensor))

    def _visit_surroundings(self) -> None:
        """What every module runs through: hooks on all modules, its class's methods, and the functions they name."""
        for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
            self._visit_table(hooks)
        kinds = {kind: None for module in self._all_modules() for kind in type(module).__mro__ if kind is not object}
        files = dict[str, set[str]]()
        for kind in kinds:
            forward: Any = vars(kind).get("forward")
            inner = unwrap(forward) if callable(forward) else None  # out of its decorators
            named = {"forward", *(names_in(inner.__code__) if isinstance(inner, FunctionType) else ())}
            self._choose(vars(kind), named)
            if package_of(kind) in LIBRARIES and kind.__module__ in sys.modules:
                files.setdefault(kind.__module__, set()).update(named)
        for file, named in files.items():
            self._choose(vars(sys.modules[file]), named)
        for kind in kinds:
            if package_of(kind) not in LIBRARIES:
                self._callables += [each for each in vars(kind).values() if isinstance(each, FunctionType)]

    def _choose(self, table: Mapping[str, Any], names: set[str]) -> None:
        known = [name for name in table if name in names]
        self._chosen.append((table, known))
        self._leaves += [len(known), *(table[name] for name in known)]

    def _visit_modules_of_callables(self) -> None:
        """A module that a hook or a patched method runs is part of the model, wherever it is kept."""
        done = 0
        while done < len(self._callables):
            held = reached_from(self._callables[done], beyond=_is_module)
            done += 1
            for module in [each for each in held if isinstance(each, nn.Module)]:
                self.holds_the_model |= id(module) == self._model_id
                if id(module) not in self._seen:
                    self._visit_module(module)

    # What is compared.

    def _all_modules(self) -> list[nn.Module]:
        """All modules, the model itself first as long as it lives: a snapshot does not keep it."""
        model = self._model()
        return [*([] if model is None else [model]), *self._modules]

    def _own_buffers(self) -> Iterator[torch.Tensor]:
        for module in self._all_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and is_own_buffer(module, name, buffer):
                    yield buffer

    def _live_leaves(self) -> list[Any]:
        """What functions hold, which a copy shares with the user: compared at every call, not followed by a copy."""
        leaves: list[Any] = []
        for value in chain.from_iterable(reached_from(each, beyond=_is_module) for each in self._callables):
            leaves.append(type(value) if is_container(value) or is_holder(value) else value)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Module):
                leaves += [version_of(value), *layout_of(value)]
        return leaves


class _Slots:
    """The values of an object that its class keeps outside a dictionary, read anew each time."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._names = [name for kind in type(holder).__mro__ for name in slots_of(kind)]

    def __bool__(self) -> bool:
        return bool(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._holder, name, None) for name in self._names)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects; numbers, texts and methods count by value."""
    if len(one) != len(two):
        return False
    pairs = zip(one, two, strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in _BY_VALUE and bool(a == b)) for a, b in pairs)
