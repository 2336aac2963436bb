"""The parts of Python values by name: the containers and objects that a module's settings are made of."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Kinds of values that hold nothing and never change; they are compared by value."""

CONTAINERS = (dict, list, tuple, set, frozenset, deque)

LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao"})
"""Packages whose objects keep the state of a kernel in their attributes, which their own passes change."""

_MANY = 4096  # entries of a container beyond which it is data (a vocabulary), and its identity alone counts
_FOLLOWED = frozenset({"types", "argparse", "collections"})  # of the standard library, those that merely hold values
_CLOSED_KINDS = (type, ModuleType, FunctionType, MethodType, partial, torch.Tensor, nn.Module, Enum)


def package_of(thing: Any) -> str:
    """The top-level package in which a class or function is defined."""
    return str(getattr(thing, "__module__", None)).partition(".")[0]


def is_container(value: Any) -> bool:
    """Whether a value is a collection small enough to be followed."""
    return isinstance(value, CONTAINERS) and len(value) <= _MANY


def is_holder(value: Any) -> bool:
    """Whether a value is an object that holds others by name and can be copied by them.

    Not those of the standard library (locks, files, loggers), tokenizers, this package's own objects, and objects that
    release something when they are deleted.
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
    """The function that `torch.compile` was given; any other value itself."""
    while getattr(function, "_torchdynamo_wrapper_id", None) == id(function):
        function = function._torchdynamo_orig_callable
    return function


def attributes_of(holder: Any) -> Mapping[str, Any]:
    """An object's attributes, slots included."""
    slots = (name for kind in type(holder).__mro__ for name in slots_of(kind) if hasattr(holder, name))
    return {**getattr(holder, "__dict__", {}), **{name: getattr(holder, name) for name in slots}}


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class itself keeps outside its objects' dictionaries."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))
