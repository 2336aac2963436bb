"""What a chain or an engine is made of: a digest of the user's code in it, and of the settings of its parts.

What a run may change (histories, caches, counters, documents) is not part of it, and neither are weights: a record is
also tried out on some of its inputs before it is believed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from pydantic import BaseModel

from semgrad_guard.adapters.code_identity import content_digest
from semgrad_guard.calibration.call_options import FIELDS

_MOST = 20_000
"""Objects that are looked at."""
_OPAQUE = frozenset({"torch", "transformers", "tokenizers", "numpy", "pandas", "threading", "asyncio", "httpx"})
"""Packages whose objects hold weights, data or connections, and no code of the user's."""
_SCALARS = (bool, int, float, str, type(None))
_OF_RUNS = frozenset({"metadata", "callbacks", "callback_manager", "tags", "name", "id", "id_", "cache", "verbose"})
"""Fields that change nothing about an answer."""
_OF_MODELS = frozenset({*FIELDS, "model", "model_name", "dtype", "revision", "prompt_template"})


def chain_identity(parts: Iterable[Any], *, models: tuple[type, ...]) -> str:
    """Sixteen hex digits for the user's code and the settings within `parts`.

    Of a language model (one of `models`) only options of its answers count, as it may count its calls in others.
    """
    found, seen, waiting = set[str](), dict[int, Any](), list(parts)
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if isinstance(value, (*_SCALARS, bytes, ModuleType)) or id(value) in seen:
            continue
        seen[id(value)] = value
        waiting += _inner(value, found, models)
    return hashlib.sha256("\n".join(sorted(found)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _inner(value: Any, found: set[str], models: tuple[type, ...]) -> list[Any]:
    """Note what a value itself adds, and return the values in it."""
    if isinstance(value, FunctionType):
        if _is_the_users(value):
            found.add(content_digest(value))
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Mapping):
        return [*cast("Mapping[Any, Any]", value).values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*cast("Iterable[Any]", value)]
    kind = cast("type[Any]", value if isinstance(value, type) else type(value))
    if kind.__module__.partition(".")[0] in _OPAQUE:
        return []
    if _is_the_users(kind):
        found.add(content_digest(kind))
    if isinstance(value, type):
        return []
    fields: Mapping[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, BaseModel):
        known = _OF_MODELS if isinstance(value, models) else type(value).model_fields.keys() - _OF_RUNS
        settings = {name: fields[name] for name in sorted(known) if name in fields}
        found.update(f"{kind.__qualname__}.{name}={text}" for name, of in settings.items() if (text := _setting(of)))
    return [each for name, each in fields.items() if name not in _OF_RUNS]


def _setting(value: Any) -> str:
    """A setting as text; empty for what is none by itself."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
    else:
        items = [*cast("Mapping[str, Any]", value).items()] if isinstance(value, Mapping) else [value]
    plain = all(isinstance(each, (*_SCALARS, tuple)) for each in items)
    return repr(items) if items and plain and len(items) <= 16 else ""


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where nothing is in it
    except ValueError:
        return False
    return True


def _is_the_users(code: Any) -> bool:
    """Whether a function or class is defined neither in Python nor in an installed package."""
    name = str(getattr(code, "__module__", None) or "builtins")
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return "site-packages" not in file and "dist-packages" not in file and not top.endswith("semgrad_guard")
