"""Options under their known names: an unknown one is an `InputError` that names those there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from semgrad_guard.errors import require_known

T = TypeVar("T")
P = ParamSpec("P")

_OLD, _NEW = "max_new_tokens", "max_tokens"


def knows_its_options(initialize: Callable[P, None]) -> Callable[P, None]:
    """For an `__init__`: refuses keywords that it does not have."""
    known = [
        each.name
        for each in signature(initialize).parameters.values()
        if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY) and each.name != "self"
    ]

    @wraps(initialize)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        require_known(type(args[0]).__name__, options, known)
        initialize(*args, **options)

    return checked


def has_max_tokens(options: type[T]) -> type[T]:
    """For a dataclass with `max_tokens`: its old name `max_new_tokens` works for one release, with a warning."""
    generated: Any = options.__init__
    known = [field.name for field in fields(options)]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @wraps(generated)
    def initialize(self: T, *args: Any, **given: Any) -> None:
        if _OLD in given:  # `dataclasses.replace` hands both over; what was asked for is the old one
            _warn(options.__name__)
            given[_NEW] = given.pop(_OLD)
        require_known(options.__name__, given, known)
        generated(self, *args, **given)

    def old_name(self: Any) -> int:
        _warn(options.__name__)
        return getattr(self, _NEW)

    setattr(options, "__init__", initialize)  # noqa: B010 - a type checker keeps to the generated signature
    setattr(options, _OLD, property(old_name))
    return options


def _warn(owner: str) -> None:
    warnings.warn(
        f"{owner}.{_OLD} is now {owner}.{_NEW}; the old name goes away with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
