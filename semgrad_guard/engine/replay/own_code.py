"""The Python code and values of a model, and whether a change of all that it depends on would be seen.

A module's settings are made of containers and objects, whose parts are found by name. Methods of the modules' classes
are compared by identity. Other code may read variables that no comparison reaches: hooks, methods replaced on one
object, functions among a module's settings, and a class in the user's program that reads more than constants. A model
with such code is never taken for the same as before.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from inspect import unwrap
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerBase

from semgrad_guard.errors import UnsupportedModelError

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
    if not hasattr(value, "__dict__") and not slots_of(type(value)):
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
    slots = {name: getattr(holder, name) for name in slots_of(type(holder)) if hasattr(holder, name)}
    return {**getattr(holder, "__dict__", {}), **slots}


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class and its bases keep outside their objects' dictionaries."""
    held = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for slots in held for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""A module's tables of hooks, and the tables of their flags."""

# transformers leaves these on a model at its first `output_hidden_states=True`; they do nothing of themselves.
_INERT_HOOKS = "transformers.utils.output_capturing"
_FORWARD_ONLY = "make_inputs_require_grads"  # a hook that requires gradients and changes no number

_CALL = ("__call__", "_wrapped_call_impl", "_call_impl")
_OF_CHECKPOINTS = "transformers_modules"  # the package in which transformers puts the code that a checkpoint brings
_CONSTANTS = (*ATOMS, BuiltinFunctionType, logging.Logger)


def is_inert(hook: object) -> bool:
    """Whether a forward hook changes no number of a forward pass."""
    return getattr(hook, "__module__", None) == _INERT_HOOKS or getattr(hook, "__name__", "") == _FORWARD_ONLY


def is_replaced(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute of one module replaces a method of its class."""
    method: Any = getattr(type(module), name, None)
    if not callable(method) or not callable(value):
        return False
    plain = innermost(value)
    return not (isinstance(plain, MethodType) and plain.__self__ is module and plain.__func__ is method)


def is_of_program(thing: type | FunctionType) -> bool:
    """Whether a class or function is the user's own, and neither an installed package's nor a checkpoint's.

    `LIBRARIES` are packages wherever they lie: in a checkout (`pip install -e`), in a folder of `pip install --target`.
    """
    name = str(thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else thing.__module__)
    return _is_of_program(name)


@lru_cache(maxsize=1024)
def _is_of_program(name: str) -> bool:
    package = name.partition(".")[0]
    if package == "__main__":
        return True
    if package in sys.stdlib_module_names or package in LIBRARIES or package in ("semgrad_guard", _OF_CHECKPOINTS):
        return False
    file = str(getattr(sys.modules.get(name), "__file__", ""))
    return "site-packages" not in file and "dist-packages" not in file


class Code:
    """The functions and constants on which the methods of modules depend, by the class or file that they are in.

    Of a library's class with a `forward`: its methods, and the functions of its file. Of a class of the user's program:
    all that it holds, and the global names that its methods read. `unseen` is a variable, in words, whose change would
    not be seen: constants and functions are compared by identity, and any other value may change in place.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.unseen: str | None = None
        self._tables: dict[Hashable, Mapping[str, Any]] = {}
        self._values: dict[tuple[Hashable, str], Any] = {}
        self._take(nn.Module, vars(nn.Module), _CALL)
        self._take_functions(functional.__name__, vars(functional))
        own = list[Any]()
        for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
            table = vars(kind)
            if is_of_program(kind):
                self._take(kind, table, [name for name in table if not name.startswith("__")])
                own += table.values()
            elif "forward" in table and kind is not nn.Module:
                self._take_functions(kind, table)
                if kind.__module__ in sys.modules:
                    self._take_functions(kind.__module__, vars(sys.modules[kind.__module__]))
        self._take_variables(own)

    def chosen(self) -> list[tuple[Mapping[str, Any], list[str]]]:
        """The dictionaries, each with the names in it that count."""
        names: dict[Hashable, list[str]] = {place: [] for place in self._tables}
        for place, name in self._values:
            names[place].append(name)
        return [(table, names[place]) for place, table in self._tables.items()]

    def settings(self) -> Iterator[tuple[str, Any]]:
        """The values other than functions, by name."""
        for (place, name), value in self._values.items():
            if not _runs(value):
                yield f"{_named(place)}.{name}", value

    def replaced_since(self, first: Code) -> str | None:
        """The first function that was replaced since; places that are not in both are not compared."""
        for key in {**first._values, **self._values}:
            one, other = first._values.get(key), self._values.get(key)
            if one is not other and (_runs(one) or _runs(other)) and key[0] in first._tables and key[0] in self._tables:
                return f"{_named(key[0])}.{key[1]}"
        return None

    def _take(self, place: Hashable, table: Mapping[str, Any], names: Iterable[str]) -> None:
        self._tables[place] = table
        self._values.update({(place, name): table[name] for name in names})

    def _take_functions(self, place: Hashable, table: Mapping[str, Any]) -> None:
        names = [name for name, value in table.items() if isinstance(value, (FunctionType, BuiltinFunctionType))]
        # torch.compile adds functions with such names to a file.
        self._take(place, table, [name for name in names if isinstance(place, type) or not name.startswith("__")])

    def _take_variables(self, methods: Iterable[Any]) -> None:
        waiting, known = list(_functions_of(methods)), set[FunctionType]()
        while waiting:
            function = waiting.pop()
            if function in known or not is_of_program(function):
                continue
            known.add(function)
            names = [name for name in _names_in(function.__code__) if name in function.__globals__]
            self._take(str(function.__globals__.get("__name__")), function.__globals__, names)
            values = {name: function.__globals__[name] for name in names}
            waiting += _functions_of(values.values())
            held = [name for name in function.__code__.co_freevars if name != "__class__"]
            changing = [*held, *(name for name, value in values.items() if not _is_constant(value))]
            if changing and self.unseen is None:
                self.unseen = f"{function.__qualname__} reads the variable {changing[0]!r}"


def _runs(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


def _named(place: Hashable) -> str:
    return f"{place.__module__}.{place.__qualname__}" if isinstance(place, type) else str(place)


class WithoutOriginals(TorchFunctionMode):
    """For the time of a block, this thread uses no weight of the user's own model.

    Code of the user's may name a module of the model (in a closure, as a global variable) that would run in the copy's
    place: in training mode, without the hooks of a replay, and outside its graph.
    """

    def __init__(self, originals: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._originals = {id(tensor) for tensor in originals}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless a weight of the original is among its arguments.

        Raises:
            UnsupportedModelError: it is.
        """
        if any(id(value) in self._originals for value in args):
            raise UnsupportedModelError(
                "a hook or a replaced method of this model runs the model's own modules, or uses its weights, and not "
                "those of the copy that is scored. Use the module that the hook is given, copy the numbers that it "
                "needs once (weight.detach().clone()), or load the model again."
            )
        return func(*args, **(kwargs or {}))


def _functions_of(values: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among values, out of their decorators, class methods and properties."""
    for value in values:
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            plain: Any = unwrap(inner)
            yield from (function for function in (inner, plain) if isinstance(function, FunctionType))


def _is_constant(value: Any) -> bool:
    if isinstance(value, (FunctionType, type)):
        return isinstance(value, FunctionType) or not is_of_program(value) or issubclass(value, nn.Module)
    if isinstance(value, ModuleType):
        return not _is_of_program(value.__name__)
    return isinstance(value, _CONSTANTS)


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names_in(part)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
