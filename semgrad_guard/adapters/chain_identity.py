"""The identity of a chain or an engine: a digest of the user's code in it, and of the settings of its parts.

Values that a run may change (histories, caches, counters, documents) are not part of it, and neither are weights: a
record is also tried out on some of its inputs before it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from pydantic import BaseModel

from semgrad_guard.adapters.code_identity import closed_over, code_text, names_of, nested_code, sixteen_digits
from semgrad_guard.calibration.call_options import FIELDS

_MOST = 20_000
"""Objects that are looked at."""
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
    facts, seen, waiting = set[str](), dict[int, Any](), list(parts)
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen[id(value)] = value
        waiting += _inner(value, facts, models)
    return sixteen_digits(*sorted(facts))


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
        return [*cast("Iterable[Any]", value)]
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
    """A value that no run changes as text, any other one by its type."""
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
