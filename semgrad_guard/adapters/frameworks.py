"""The private names of a framework on which an integration depends: checked together, when the package is imported.

Withholding hangs on places that a framework may move in any release. One that lacks such a place would deliver answers
unjudged, so an integration refuses it (`UnsupportedFrameworkError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, cast


def absent_names(names: Mapping[str, Sequence[str]], uses: Mapping[Callable[..., Any], Sequence[str]]) -> Iterator[str]:
    """The names that an integration needs and a framework lacks.

    Args:
        names: names by the "module" or "module:class" that holds them.
        uses: functions of the framework, and the names that each must use: an override must be called, a field be set.
    """
    for place, needed in names.items():
        module, _, holder = place.partition(":")
        try:
            found: Any = import_module(module)
        except ImportError:
            yield module
            continue
        found = getattr(found, holder, None) if holder else found
        yield from (f"{place}.{name}" for name in needed if not hasattr(found, name))
    for function, needed in uses.items():
        used = set(_names_in(cast("FunctionType", function).__code__))
        yield from (f"{function.__qualname__}'s use of {name}" for name in needed if name not in used)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names in a function's code, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
