"""A function by its content: what it does is bound to a calibration, and a name would not tell that.

The digest is over a function's code and all that the code works with: defaults, values that it closes over, globals
that it reads, what it names in modules, and code of the same package that it calls. Python's version is part of it, as
bytecode changes with it. Other packages' functions and classes count by their names. Where a value cannot be put into a
digest, the function is refused: a `Versioned` one has the name and the version that its user gives it.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import dis
import enum
import functools
import hashlib
import importlib
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from semgrad_guard.errors import InputError

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_BASES = (bool, int, float, complex, str, bytes, type(None), tuple, list, set, frozenset, dict)
_PRINTED = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, uuid.UUID, PurePath)
_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_OUTSIDE = frozenset({"open", "eval", "exec", "globals", "locals", "vars", "input", "__import__"})
_OUTSIDE_ATTRIBUTES = frozenset({"getenv", "environ", "open", "read_text", "read_bytes"})
"""Builtins and attributes by which code works with values that it does not name."""
_OF_CLASSES = frozenset({"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__firstlineno__"})


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A function with a name and a version of the user's own: whoever changes what it does gives it another version.

    Versioned(first_call, name="first-call", version="1")
    """

    function: Callable[..., T]
    name: str
    version: str

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"a versioned function is a function, not a {type(self.function).__name__}")
        if not all(isinstance(each, str) and each for each in (self.name, self.version)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError("a versioned function has a name and a version, both of them texts")

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Call the function."""
        return self.function(*args, **kwargs)


class _UnknownStateError(Exception):
    """A value that no digest can be made of."""


def code_identity(function: Callable[..., Any], *, role: str) -> str:
    """A name for a function that another one does not have: its own name, and a digest of its content.

    Args:
        function: the function, or an object that can be called.
        role: the argument that takes it, for the error.

    Raises:
        InputError: its content cannot be known.
    """
    if isinstance(function, Versioned):
        return f"{function.name}@{function.version}"
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        return f"{name}:{_Content(_package(function)).digest(function, root=True)}"
    except (_UnknownStateError, RecursionError, ValueError) as error:
        raise InputError(
            f"{role}={name} cannot be bound to a calibration by its content: {error}. Give it a name and a version, "
            f"and another version whenever it changes: {role}=Versioned({name}, name=..., version=...), from "
            "llama_index_semgrad_guard"
        ) from error


def content_digest(value: Any) -> str:
    """Sixteen hex digits for a function or a structure, as far as its content can be known.

    What a run may change (lists, tables and sets that a function closes over or reads) counts by its type, and so does
    what no digest can be made of.
    """
    return _Content(_package(value), strict=False).digest(value)


class _Content:
    """Digests of values within one package."""

    def __init__(self, package: str, *, strict: bool = True) -> None:
        self._package, self._strict = package, strict
        self._open: list[int] = []

    def digest(self, value: Any, *, root: bool = False) -> str:
        """Sixteen hex digits."""
        if root and not _has_code(value):
            raise _UnknownStateError(f"a {type(value).__name__} has no Python code")
        text = "\x1f".join(self._parts(value))
        return hashlib.sha256(f"{sys.version_info[:2]}\x1e{text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def _parts(self, value: Any) -> Iterator[str]:
        if id(value) in self._open:
            yield "itself"
            return
        self._open.append(id(value))
        try:
            yield type(value).__name__
            yield from self._content(value)
            kind = cast("type[Any]", type(value))
            if isinstance(value, _BASES) and kind not in _BASES:  # a subclass has methods and fields of its own
                yield from self._class(kind)
                yield self.digest(getattr(cast("Any", value), "__dict__", None))
        finally:
            self._open.pop()

    def _content(self, value: Any) -> Iterator[str]:  # noqa: C901 - one branch for each kind of value
        if isinstance(value, enum.Enum):
            yield f"{type(value).__qualname__}.{value.name}={self.digest(value.value)}"
        elif isinstance(value, (*_PLAIN, *_PRINTED)):
            yield repr(value)
        elif isinstance(value, re.Pattern):
            known = cast("re.Pattern[Any]", value)
            yield f"{known.pattern!r}{known.flags}"
        elif isinstance(value, (tuple, list)):
            for each in cast("list[Any]", value):
                yield self.digest(each)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(self.digest(each) for each in cast("set[Any]", value))
        elif isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            yield from (f"{self.digest(key)}={self.digest(of)}" for key, of in items)
        elif isinstance(value, CodeType):
            yield from self._code(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from (self.digest(value.__func__), self.digest(value.__self__))
        elif isinstance(value, functools.partial):
            made = cast("functools.partial[Any]", value)
            yield from (self.digest(made.func), self.digest(made.args), self.digest(made.keywords))
        elif isinstance(value, (staticmethod, classmethod)):
            yield self.digest(cast("Any", value).__func__)
        elif isinstance(value, property):
            yield self.digest([value.fget, value.fset])
        elif isinstance(value, ModuleType):
            yield value.__name__  # of what is in it, `_function` knows the names that are read
        elif isinstance(value, type):
            yield from self._class(cast("type[Any]", value))
        elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (ModuleType, type(None))):
            yield f"{value.__module__}.{value.__qualname__}"
        else:
            yield from self._object(value)

    def _code(self, code: CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags))
        yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        for const in code.co_consts:
            yield self.digest(const)

    def _function(self, function: FunctionType) -> Iterator[str]:
        if _package(function) != self._package:
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield from self._code(function.__code__)
        yield self.digest([function.__defaults__, function.__kwdefaults__, vars(function)])
        reads = _globals_of(function.__code__)
        attributes = _names_of(function.__code__)
        outside = sorted((_OUTSIDE & reads - function.__globals__.keys()) | (_OUTSIDE_ATTRIBUTES & attributes))
        if self._strict and outside:
            raise _UnknownStateError(f"{outside[0]} in it works with values that it does not name")
        closed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in closed:
            try:
                held = cell.cell_contents
                yield f"{name}={self._read(held, attributes)}"
            except ValueError:  # nothing has been assigned yet
                yield f"{name} is empty"
        for name in sorted(reads):
            if name in function.__globals__:
                yield f"{name}={self._read(function.__globals__[name], attributes)}"
            elif not hasattr(builtins, name):
                yield f"{name} is missing"
        for name in sorted(_imports_of(function.__code__)):
            yield f"import {name}={self._read(_imported(name), attributes)}"

    def _read(self, value: Any, names: frozenset[str]) -> str:
        """A value that code works with; of a module, the values of these names in it."""
        if not isinstance(value, ModuleType) or id(value) in self._open:
            return self._seen(value)
        if self._strict and "getattr" in names:
            raise _UnknownStateError(f"getattr in it may read anything in the module {value.__name__}")
        self._open.append(id(value))
        try:
            found = [
                f"{name}={self._in_module(vars(value)[name], names)}" for name in sorted(names & vars(value).keys())
            ]
        finally:
            self._open.pop()
        return ",".join([value.__name__, *found])

    def _in_module(self, value: Any, names: frozenset[str]) -> str:
        """A value in a module: code of other packages counts by its name."""
        if callable(value) and _package(value) != self._package:
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        return self._read(value, names)

    def _seen(self, value: Any) -> str:
        """A value that code works with, and that a run may change."""
        changes = isinstance(value, (list, set, dict)) and not self._strict
        return type(cast("Any", value)).__name__ if changes else self.digest(value)

    def _class(self, kind: type[Any]) -> Iterator[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if _package(kind) != self._package:
            return
        for base in (*kind.__bases__, type(kind)):
            yield self.digest(base)
        for name, value in sorted(vars(kind).items()):
            made = ("_",) if issubclass(kind, enum.Enum) else ("__pydantic", "__dataclass", "_abc_", "model_")
            if name in _OF_CLASSES or name.startswith(made):
                continue
            if isinstance(value, (FunctionType, staticmethod, classmethod, property, *_PLAIN)):
                yield f"{name}={self.digest(value)}"
            elif isinstance(value, functools.cached_property):
                yield f"{name}={self.digest(cast('functools.cached_property[Any]', value).func)}"
            elif not name.startswith("__") and (_package(type(value)) == self._package or not _is_descriptor(value)):
                yield f"{name}={self._seen(value)}"

    def _object(self, value: Any) -> Iterator[str]:
        """An object by its class and its fields."""
        kind = cast("type[Any]", type(value))
        own = _package(kind) == self._package and hasattr(value, "__dict__") and not hasattr(kind, "__slots__")
        if not (own or isinstance(value, BaseModel) or hasattr(kind, "__dataclass_fields__")):
            if self._strict:
                raise _UnknownStateError(
                    f"a {kind.__module__}.{kind.__qualname__} in it has a state that cannot be known"
                )
            return
        yield from self._class(kind)
        names = sorted(getattr(value, "__dict__", ())) or sorted(getattr(kind, "__dataclass_fields__", ()))
        for name in names:
            yield f"{name}={self._seen(getattr(value, name))}"
        if isinstance(value, BaseModel):
            yield self.digest([value.__pydantic_private__, value.__pydantic_extra__])


def _has_code(value: Any) -> bool:
    """Whether a callable is Python code, or an object of a class whose call is."""
    if isinstance(value, functools.partial):
        return _has_code(cast("functools.partial[Any]", value).func)
    if isinstance(value, MethodType):
        return _has_code(value.__func__)
    return isinstance(value, FunctionType) or isinstance(
        getattr(cast("Any", type(value)), "__call__", None),  # noqa: B004 - whether it is Python code, not whether it is there
        FunctionType,
    )


def _is_descriptor(value: Any) -> bool:
    return hasattr(cast("Any", type(value)), "__get__")


def _imported(name: str) -> ModuleType | None:
    """A module that code imports when it runs."""
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError):
        return None


def _globals_of(code: CodeType) -> set[str]:
    """The names of the globals that code reads, nested code included."""
    return _arguments_of(code, _READS)


def _imports_of(code: CodeType) -> set[str]:
    """The names of the modules that code imports, nested code included."""
    return _arguments_of(code, ("IMPORT_NAME",))


def _arguments_of(code: CodeType, operations: tuple[str, ...]) -> set[str]:
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in operations}
    return names.union(*(_arguments_of(const, operations) for const in code.co_consts if isinstance(const, CodeType)))


def _names_of(code: CodeType) -> frozenset[str]:
    """The names that code reads, of globals and of attributes, nested code included."""
    return frozenset(code.co_names).union(
        *(_names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    )


def _package(value: Any) -> str:
    """The package in whose code a value is defined."""
    found = value
    while isinstance(found, functools.partial):
        found = cast("functools.partial[Any]", found).func
    module = getattr(found, "__module__", None) or type(found).__module__
    return str(module).partition(".")[0]
