"""Options as fields: read off their declarations in `semgrad_guard.settings`, and checked by them.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from semgrad_guard.errors import InputError
from semgrad_guard.named import did_you_mean


@dataclass(frozen=True)
class Bounds:
    """The range of a number; with `open_below` its lower end is outside."""

    low: float = -math.inf
    high: float = math.inf
    open_below: bool = False

    def __contains__(self, number: Any) -> bool:
        above = self.low < number if self.open_below else self.low <= number
        return above and number <= self.high and abs(number) < math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        least = f"above {self.low:g}" if self.open_below else f"at least {self.low:g}"
        return least if math.isinf(self.high) else f"{least} and at most {self.high:,}"


@dataclass(frozen=True)
class Option:
    """What belongs to an option next to its type and default. In an annotation, pydantic checks values by it.

    With a `panel`, the group in which help lists it, it is an option of the command line. `reads` names a function of
    `semgrad_guard.cli.values` that reads it there, where its type does not tell how. `shown` is its default in words,
    `spelled` another spelling than its name, `variable` one of the environment. `names` are the choices, where no
    `Literal` can list them; `completions` are offered by a shell; `check` raises a ValueError for a wrong value.
    """

    description: str
    panel: str | None = None
    metavar: str = "NAME"
    bounds: Bounds = Bounds()
    reads: str | None = None
    shown: str | None = None
    several: bool = False
    spelled: str | tuple[str, ...] = ()
    variable: str | None = None
    names: tuple[str, ...] = ()
    completions: tuple[str, ...] = ()
    check: Callable[[Any], object] | None = None

    def checked(self, value: Any) -> Any:
        """The value itself.

        Raises:
            ValueError: it is outside the bounds, or no choice.
        """
        single = () if value is None else (value,)
        parts: Iterable[Any] = cast("Any", value) if isinstance(value, (tuple, list, frozenset)) else single
        for part in parts:
            if isinstance(part, Real) and part not in self.bounds:
                raise ValueError(f"{part} is out of range: it is {self.bounds}")
            if self.names and part not in self.names:
                raise ValueError(
                    f"{part!r} is not one of {', '.join(self.names)}.{did_you_mean(str(part), self.names)}"
                )
            if self.check is not None:
                self.check(part)
        return cast("Any", value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        least, bounds = "exclusiveMinimum" if self.bounds.open_below else "minimum", self.bounds
        limits = {least: bounds.low, "maximum": bounds.high}
        return {**handler(schema), **{name: limit for name, limit in limits.items() if math.isfinite(limit)}}


@dataclass(frozen=True)
class Declared:
    """An option where it is declared: its name, its type without None, its default."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def element(self) -> Any:
        """The type of one value, where there may be several."""
        return get_args(self.kind)[0] if get_origin(self.kind) in (list, tuple, frozenset) else self.kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The values to choose from; none for an open option."""
        return get_args(self.element) if get_origin(self.element) is Literal else self.option.names

    def require(self, value: Any) -> None:
        """Refuse a value of another kind, or out of range.

        Raises:
            InputError: it is one.
        """
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name} must be one of {', '.join(map(repr, self.choices))}, not {value!r}").about(
                self.name
            )
        if self.kind is bool and not isinstance(value, bool):
            raise InputError(f"{self.name} is True or False, not {value!r}").about(self.name)
        if self.kind in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
            raise InputError(f"{self.name} must be a number, not {value!r}").about(self.name)
        try:
            self.option.checked(value)
        except ValueError as error:
            raise InputError(f"{self.name}: {error}").about(self.name) from error


@cache
def declared_options(group: type[Any]) -> Mapping[str, Declared]:
    """The options that a class declares or inherits, by name; those of its bases first."""
    hints = get_type_hints(group, include_extras=True)
    fields: Any = getattr(group, "model_fields", None) or vars(group)["__dataclass_fields__"]
    found = {
        name: declared_option(name, hints[name], fields[name].default) for name in field_names(group) if name in fields
    }
    return {name: option for name, option in found.items() if option is not None}


def declared_option(name: str, annotation: Any, default: Any = None) -> Declared | None:
    """The option that an annotation declares, if it declares one."""
    kind, metadata = _parts(annotation)
    option = next((part for part in metadata if isinstance(part, Option)), None)
    return None if option is None else Declared(name, kind, default, option)


def require_valid(options: object, group: type[Any] | None = None) -> None:
    """Refuse a value that is none for its option (of a class of options that it inherits), None by default apart.

    Raises:
        InputError: there is one.
    """
    for name, option in declared_options(group or type(options)).items():
        value = getattr(options, name)
        if value is not None or option.default is not None:
            option.require(value)


def require_known(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that there are none of.

    Raises:
        InputError: some of the given names are not known; the message names those that are.
    """
    names = sorted(known)
    if unknown := sorted(set(given) - set(names)):
        raise InputError(f"{owner} takes no {', '.join(unknown)}; it takes {', '.join(names)}")


def values_of(holder: object, group: type[Any]) -> dict[str, Any]:
    """The values that an object has for the options of a class, by name."""
    return {name: getattr(holder, name) for name in declared_options(group)}


def first_fault(error: ValidationError, *, place: bool = True) -> str:
    """The first thing that is wrong with a value, in words; with its place in it."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"])) if place else ""
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"


def field_names(kind: type[Any]) -> list[str]:
    """The names that a class and its bases annotate; those of its bases first, in their order."""
    inherited = [name for base in kind.__bases__ for name in field_names(base)]
    return list(dict.fromkeys([*inherited, *vars(kind).get("__annotations__", ())]))


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None, and the metadata next to it."""
    if get_origin(annotation) is Annotated:
        kind, further = _parts(get_args(annotation)[0])
        return kind, (*annotation.__metadata__, *further)
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return _parts(members[0]) if len(members) == 1 else (annotation, ())
    return annotation, ()
