"""What Python values hold: how far a model's behaviour can depend on a function, a container or an object."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Kinds of values that hold nothing and never change; they are compared by value."""

CONTAINERS = (dict, list, tuple, set, frozenset, deque)

LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao"})
"""Packages whose functions depend on their arguments and on their module's names, not on a user's variables."""

_MANY = 4096  # entries of a container beyond which it is data (a vocabulary), and its size alone is looked at
_MOST = 20_000  # values that are followed from one place
_FOLLOWED = frozenset({"types", "argparse", "collections"})  # of the standard library, those that merely hold values
_CLOSED_KINDS = (type, ModuleType, FunctionType, MethodType, partial, torch.Tensor, nn.Module, Enum)


def package_of(thing: Any) -> str:
    """The top-level package in which a class or function is defined."""
    return str(getattr(thing, "__module__", None)).partition(".")[0]


def is_container(value: Any) -> bool:
    """Whether a value is a collection small enough to be followed."""
    return isinstance(value, CONTAINERS) and len(value) <= _MANY


def is_holder(value: Any) -> bool:
    """Whether a value is an object of somebody's own class that holds others by name and can be copied by them.

    Not those of the standard library (locks, files, loggers), tokenizers, this package's own objects, and what gives
    something back when it is deleted.
    """
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, (*_CLOSED_KINDS, *CONTAINERS, PreTrainedTokenizerBase)):
        return False
    if not hasattr(value, "__dict__") and not any(map(slots_of, type(value).__mro__)):
        return False
    package = package_of(type(value))
    if package == "semgrad_guard" or (package in sys.stdlib_module_names and package not in _FOLLOWED):
        return False
    return not hasattr(type(value), "__del__")


def innermost(function: Any) -> Any:
    """What a compiled callable computes: the function that `torch.compile` was given."""
    while getattr(function, "_torchdynamo_wrapper_id", None) == id(function):
        function = function._torchdynamo_orig_callable
    return function


def held_by(value: Any) -> list[Any]:
    """The values that a callable, container or object holds, one step deep; none where it is closed."""
    if isinstance(value, FunctionType):
        named = (vars(value), value.__kwdefaults__ or {}, globals_of(value))
        return [*cells_of(value), *(value.__defaults__ or ()), *(each for names in named for each in names.values())]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    if is_container(value):
        return list(value.values() if isinstance(value, dict) else value)
    return list(attributes_of(value).values()) if is_holder(value) else []


def reached_from(value: Any, *, beyond: Callable[[Any], bool]) -> Iterator[Any]:
    """`value` and everything it holds, each thing once; what `beyond` is true of is named and not entered."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST:
        found = waiting.pop()
        if type(found) not in ATOMS:
            if id(found) in seen:
                continue
            seen.add(id(found))
        yield found
        if not beyond(found):
            waiting.extend(reversed(held_by(found)))


def attributes_of(holder: Any) -> Mapping[str, Any]:
    """An object's attributes, slots included."""
    slots = (name for kind in type(holder).__mro__ for name in slots_of(kind) if hasattr(holder, name))
    return {**getattr(holder, "__dict__", {}), **{name: getattr(holder, name) for name in slots}}


def cells_of(function: FunctionType) -> list[Any]:
    """What a function's closure holds (variables that are not set yet are left out)."""
    return [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]


def is_empty(cell: Any) -> bool:
    """Whether a closure's variable is not set yet."""
    try:
        cell.cell_contents  # noqa: B018 - asked for its error
    except ValueError:
        return True
    return False


def globals_of(function: FunctionType) -> Mapping[str, Any]:
    """The global variables that a user's function names; none of a library's."""
    package = package_of(function)
    if package in LIBRARIES or package == "semgrad_guard" or package in sys.stdlib_module_names:
        return {}
    known = function.__globals__
    return {name: known[name] for name in names_in(function.__code__) if name in known}


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code looks up, functions inside it included."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in names_in(part)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class itself keeps outside its objects' dictionaries."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))
