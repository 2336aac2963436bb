"""The callables and objects of a model bound anew, so that in a copy they work on the copy's modules.

A method patched onto a module, a closure over the method it replaces, an object that holds a layer: all of them name
modules of the original. Taken over as they are, they would run the original's modules inside the copy.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from semgrad_guard.engine.replay.held_values import (
    ATOMS,
    attributes_of,
    globals_of,
    innermost,
    is_container,
    is_empty,
    is_holder,
    reached_from,
)

_ADDING = {list: list.append, set: set.add, deque: deque.append}


class Rebinding:
    """What stands in a copy for each thing of the original: `module` says it of modules, the rest follows from that.

    One thing has one counterpart. Functions stay the original's own unless they reach a module.
    """

    def __init__(self, module: Callable[[nn.Module], nn.Module]) -> None:
        self._module = module
        self._counterparts: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that no number is given to something else meanwhile

    def attribute(self, value: Any) -> Any:
        """What a module's attribute is in the copy: containers and objects are its own, whatever they hold."""
        if type(value) in ATOMS:
            return value
        if is_container(value) or is_holder(value):
            return self._counterpart(value, self.attribute)
        return self.bound(value)

    def bound(self, value: Any) -> Any:
        """The value itself, or its counterpart where it reaches a module."""
        value = innermost(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self._module(target)) if isinstance(target, nn.Module) else value
        if type(value) in ATOMS or not _reaches_a_module(value):
            return value
        return self._counterpart(value, self.bound)

    def _counterpart(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        known = id(value) in self._counterparts
        return self._counterparts[id(value)] if known else self._rebuilt(value, inner)

    def _note(self, value: Any, counterpart: Any) -> Any:
        self._originals.append(value)
        self._counterparts[id(value)] = counterpart
        return counterpart

    def _rebuilt(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self._note(value, MethodType(self.bound(value.__func__), inner(value.__self__)))
        if isinstance(value, partial):
            keywords = {name: inner(each) for name, each in value.keywords.items()}
            twin = self._note(value, partial(inner(value.func), *map(inner, value.args), **keywords))
            vars(twin).update({name: inner(each) for name, each in vars(value).items()})
            return twin
        return self._container(value, inner) if is_container(value) else self._holder(value, inner)

    def _function(self, function: FunctionType) -> FunctionType:
        # A function may hold itself: its counterpart is noted before its variables are.
        cells = tuple(
            cell if is_empty(cell) or not _reaches_a_module(cell.cell_contents) else CellType()
            for cell in function.__closure__ or ()
        )
        names = {name: each for name, each in globals_of(function).items() if _reaches_a_module(each)}
        own = _OwnGlobals(function.__globals__) if names else None
        known = function.__globals__ if own is None else own
        twin = self._note(function, FunctionType(function.__code__, known, function.__name__, closure=cells or None))
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            if cell is not original:
                cell.cell_contents = self.bound(original.cell_contents)
        if own is not None:
            own.update({name: self.bound(each) for name, each in names.items()})
        twin.__defaults__ = function.__defaults__ and tuple(map(self.bound, function.__defaults__))
        twin.__kwdefaults__ = function.__kwdefaults__ and self._values(function.__kwdefaults__, self.bound)
        vars(twin).update(self._values(vars(function), self.bound))
        return twin

    def _container(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, (tuple, frozenset)):
            items = list(map(inner, value))
            made = value._make(items) if hasattr(value, "_make") else type(value)(items)  # pyright: ignore
            return self._note(value, made)
        twin = self._note(value, _empty_like(value))
        if isinstance(value, dict):  # by the base's own methods: a subclass may check what it is given
            put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
            for key, each in value.items():
                put(twin, key, inner(each))
            return twin
        add: Any = next(add for kind, add in _ADDING.items() if isinstance(value, kind))
        for each in value:
            add(twin, inner(each))
        return twin

    def _holder(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            twin = object.__new__(type(value))
        except TypeError:  # made by an extension: its state is not ours to copy
            return self._note(value, value)
        self._note(value, twin)
        for name, each in attributes_of(value).items():
            object.__setattr__(twin, name, inner(each))
        return twin

    @staticmethod
    def _values(named: Mapping[str, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: inner(each) for name, each in named.items()}


class _OwnGlobals(dict[str, Any]):
    """A function's globals of which a few are its own; the others are looked up in the user's module as ever."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__(__builtins__=shared.get("__builtins__"))
        self._shared = shared

    def __missing__(self, name: str) -> Any:
        return self._shared[name]


def _reaches_a_module(value: Any) -> bool:
    return any(isinstance(each, nn.Module) for each in reached_from(value, beyond=_is_module))


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


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
