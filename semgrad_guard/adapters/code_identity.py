"""Functions, chains and engines by their content: a calibration is bound to code and values, not to names.

Known are functions that work with plain values, with other such functions, and with a few modules of the standard
library. All others are refused: a `Versioned` function has the name and the version that its user gives it.

A chain is a digest of the user's code in it, and of the settings of its parts. Values that a run may change (histories,
caches, counters, documents) are not part of it, and neither are weights: a record is also tried out on some of its
inputs before it is used.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from semgrad_guard.calibration.call_options import FIELDS
from semgrad_guard.errors import InputError

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_LIBRARIES = frozenset(
    (
        *("builtins", "collections", "difflib", "fractions", "functools", "itertools", "json", "math", "operator"),
        *("re", "statistics", "string", "textwrap", "typing", "unicodedata"),
    )
)
"""Modules that count by their names, and so does their content: no state of theirs changes a result."""
_OUTSIDE = frozenset(
    (
        *("open", "eval", "exec", "compile", "globals", "locals", "vars", "input", "__import__"),
        *("__globals__", "__builtins__", "__dict__", "modules"),
    )
)
"""Names by which code reaches values that it does not name."""


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A function with a name and a version of the user's, who changes the version together with the function.

    Versioned(first_call, name="first-call", version="1")
    """

    function: Callable[..., T]
    name: str
    version: str

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"a versioned function is a function, not a {type(self.function).__name__}")
        if not all(isinstance(text, str) and text for text in (self.name, self.version)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError("a versioned function has a name and a version, both of them texts")

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Call the function."""
        return self.function(*args, **kwargs)


class _UnknownContentError(Exception):
    """A value without a digest."""


def code_identity(function: Callable[..., Any], *, role: str) -> str:
    """A name that no other function has: the function's own, and a digest of its code and of the values it works with.

    Python's version is part of it, as bytecode changes with it.

    Args:
        function: a function, a partial one, or a `Versioned` one.
        role: the argument that takes it, for the error.

    Raises:
        InputError: its content cannot be known (a method, an object with state, a class, a module of the user's own).
    """
    if isinstance(function, Versioned):
        return f"{function.name}@{function.version}"
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        if not isinstance(function, (FunctionType, functools.partial)):
            raise _UnknownContentError(f"a {type(function).__name__} may have any state")
        return f"{name}:{sixteen_digits(str(sys.version_info[:2]), _digest(function, ()))}"
    except (_UnknownContentError, RecursionError) as error:
        raise InputError(
            f"{role}={name} cannot be bound to a calibration by its content: {error}. Give it a name and a version, "
            f"and another version whenever it changes: {role}=Versioned({name}, name=..., version=...), from "
            "llama_index_semgrad_guard"
        ) from error


def _digest(value: Any, around: tuple[Any, ...]) -> str:
    """The digest of a value within others, one of which it may be itself (a recursive function)."""
    if any(value is outer for outer in around):
        return "itself"
    inside, kind = (*around, value), cast("type[Any]", type(value))
    if kind in _PLAIN:
        parts = [repr(value)]
    elif kind in (tuple, list):
        parts = [_digest(item, inside) for item in value]
    elif kind in (set, frozenset):
        parts = sorted(_digest(item, inside) for item in value)
    elif kind is dict:
        parts = [_digest(item, inside) for pair in value.items() for item in pair]
    elif kind is re.Pattern:
        parts = [repr(value.pattern), str(value.flags)]
    elif kind is functools.partial:
        parts = [_digest(item, inside) for item in (value.func, value.args, value.keywords)]
    elif name := _name_in_library(value):
        parts = [name]
    elif kind is FunctionType:
        parts = [code_text(value.__code__), *(_digest(item, inside) for item in _works_with(value))]
    else:
        raise _UnknownContentError(f"it works with a {kind.__module__}.{kind.__qualname__}, which may have any state")
    return sixteen_digits(kind.__name__, *parts)


def _name_in_library(value: Any) -> str:
    """The name of a library's module, function or class; empty for any other value."""
    if isinstance(value, ModuleType):
        home, name = value.__name__, value.__name__
    elif isinstance(value, FunctionType):  # `__module__` may be another function's (functools.wraps)
        home, name = str(value.__globals__.get("__name__")), value.__qualname__
    elif isinstance(value, (type, BuiltinFunctionType)):
        home, name = str(value.__module__), value.__qualname__
    else:
        return ""
    package = home.partition(".")[0]
    if home == "builtins" and name in _OUTSIDE:
        return ""
    known = package in _LIBRARIES or (isinstance(value, type) and package == "llama_index")
    return f"{home}.{name}" if known else ""


def _works_with(function: FunctionType) -> list[Any]:
    """The values that a function works with: its defaults, its fields, those closed over, and named globals."""
    nested = nested_code(function.__code__)
    outside = _OUTSIDE.intersection(name for code in nested for name in code.co_names)
    if outside or names_of(nested, "IMPORT_NAME"):
        raise _UnknownContentError(f"{min(outside, default='an import')} in it reaches values that it does not name")
    reads = names_of(nested, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    values = {name: function.__globals__[name] for name in sorted(reads) if name in function.__globals__}
    return [function.__defaults__, function.__kwdefaults__, vars(function), closed_over(function), values]


def names_of(nested: list[CodeType], *operations: str) -> set[str]:
    """The names that these operations have in code."""
    steps = (step for code in nested for step in dis.get_instructions(code))
    return {str(step.argval) for step in steps if step.opname in operations}


def closed_over(function: FunctionType) -> dict[str, Any]:
    """The values that a function closes over, by their names; an empty cell has none yet."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def nested_code(code: CodeType) -> list[CodeType]:
    """Code, and the code of the functions, classes and comprehensions in it."""
    return [code, *(inner for const in code.co_consts if isinstance(const, CodeType) for inner in nested_code(const))]


def code_text(code: CodeType) -> str:
    """The instructions of code, without its place: a file's name or a line's number changes nothing."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    constants = [code_text(const) if isinstance(const, CodeType) else _constant(const) for const in code.co_consts]
    return repr((code.co_code, names, counts, constants))


def _constant(value: Any) -> str:
    """A constant of code; sets of them have an order of their own in each process."""
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, cast('frozenset[Any]', value)))!r}"
    return f"{type(value).__name__} {value!r}"


def sixteen_digits(*parts: str) -> str:
    """Sixteen hex digits."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


_OPAQUE = frozenset({"torch", "transformers", "tokenizers", "numpy", "pandas", "threading", "asyncio", "httpx"})
"""Packages whose objects hold weights, data or connections, and no code of the user's."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_OF_RUNS = frozenset({"metadata", "callbacks", "callback_manager", "tags", "name", "id", "id_", "cache", "verbose"})
"""Fields that change nothing about an answer."""
_OF_MODELS = frozenset({*FIELDS, "model", "model_name", "dtype", "revision", "prompt_template"})
_GENERATED = ("__pydantic", "__dataclass", "__annotat", "__doc__", "__firstlineno__", "_abc_", "model_")
"""How the names begin that Python and pydantic give to members of a class."""


def chain_identity(parts: Iterable[Any], *, models: tuple[type, ...]) -> str:
    """Sixteen hex digits for the user's code and the settings within `parts`.

    Of a language model (one of `models`) only options of its answers count, as it may count its calls in others.
    """
    facts = set[str]()
    parts_within(parts, models=models, facts=facts)
    return sixteen_digits(*sorted(facts))


def parts_within(parts: Iterable[Any], *, models: tuple[type, ...], facts: set[str] | None = None) -> list[Any]:
    """The objects within `parts`, themselves included; their own facts are added to `facts`."""
    facts, seen, waiting = set[str]() if facts is None else facts, dict[int, Any](), list(parts)
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen[id(value)] = value
        waiting += _inner(value, facts, models)
    return list(seen.values())


def _inner(value: Any, facts: set[str], models: tuple[type, ...]) -> list[Any]:
    """Add the value's own facts, and return the values in it."""
    if isinstance(value, FunctionType):
        return _in_function(value, facts)
    if isinstance(value, type):
        return _in_class(cast("type[Any]", value), facts)
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        return [cast("Any", value).__func__, getattr(cast("Any", value), "__self__", None)]
    if isinstance(value, (property, cached_property)):
        return [getattr(cast("Any", value), name, None) for name in ("fget", "fset", "func")]
    if isinstance(value, Mapping):
        return [*cast("Mapping[Any, Any]", value).values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [item for item in cast("Iterable[Any]", value) if not isinstance(item, _SCALARS)]  # vectors are long
    kind = cast("type[Any]", type(value))
    if isinstance(value, ModuleType) or kind.__module__.partition(".")[0] in _OPAQUE:
        return []
    fields: Mapping[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, BaseModel):
        known = _OF_MODELS if isinstance(value, models) else type(value).model_fields.keys() - _OF_RUNS
        settings = {name: fields[name] for name in sorted(known) if name in fields}
        facts.update(f"{kind.__qualname__}.{name}={text}" for name, of in settings.items() if (text := _setting(of)))
    return [kind, *(field for name, field in fields.items() if name not in _OF_RUNS)]


def _in_function(function: FunctionType, facts: set[str]) -> list[Any]:
    """A function of the user's counts by its code and by the values that it works with, whatever module they are in."""
    values = [*closed_over(function).items(), ("defaults", function.__defaults__), ("named", function.__kwdefaults__)]
    if _is_the_users(function):
        nested = nested_code(function.__code__)
        names = {name for code in nested for name in code.co_names}
        scopes = [function.__globals__]
        for name in names_of(nested, "IMPORT_NAME"):
            with suppress(ImportError, ValueError):
                scopes.append({name: importlib.import_module(name)})
        modules = [of for scope in scopes for name, of in scope.items() if name in names and isinstance(of, ModuleType)]
        scopes += [vars(module) for module in modules if _is_the_users(module)]
        values += [(name, scope[name]) for scope in scopes for name in sorted(names & scope.keys())]
        plain = [f"{name}={_plain(value)}" for name, value in values]
        facts.add(sixteen_digits(function.__qualname__, code_text(function.__code__), *plain))
    return [value for _, value in values]


def _in_class(kind: type[Any], facts: set[str]) -> list[Any]:
    """A class of the user's counts by its methods, its plain members and its bases."""
    if not _is_the_users(kind):
        return []
    members = {name: member for name, member in sorted(vars(kind).items()) if not name.startswith(_GENERATED)}
    plain = [f"{name}={_plain(member)}" for name, member in members.items() if isinstance(member, (*_SCALARS, tuple))]
    facts.add(sixteen_digits(f"{kind.__module__}.{kind.__qualname__}", *plain))
    code = (FunctionType, staticmethod, classmethod, property, cached_property, type)
    return [*kind.__bases__, *(member for member in members.values() if isinstance(member, code))]


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return repr([*map(_plain, cast("tuple[Any, ...]", value))])
    if isinstance(value, frozenset):
        return repr(sorted(map(_plain, cast("frozenset[Any]", value))))
    return repr(value) if isinstance(value, _SCALARS) else type(value).__qualname__


def _setting(value: Any) -> str:
    """A setting as text; empty for a value that is not a setting by itself."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
    else:
        items = [*cast("Mapping[str, Any]", value).items()] if isinstance(value, Mapping) else [value]
    plain = all(isinstance(item, (*_SCALARS, tuple)) for item in items)
    return repr(items) if items and plain and len(items) <= 16 else ""


def _is_the_users(code: Any) -> bool:
    """Whether a module, a function or a class is neither Python's nor an installed package's."""
    name = str(code.__name__ if isinstance(code, ModuleType) else getattr(code, "__module__", None) or "builtins")
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return "site-packages" not in file and "dist-packages" not in file and not top.endswith("semgrad_guard")
