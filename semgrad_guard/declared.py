"""Options as fields: read off their declarations in `semgrad_guard.settings`, and checked by them.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
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
        checked = core_schema.no_info_after_validator_function(self.checked, handler(source))
        if get_origin(source) is not tuple:
            return checked
        return core_schema.with_info_before_validator_function(
            lambda value, info: plain(info.field_name or "this", value, source), checked
        )

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

    def require(self, value: Any) -> Any:
        """The value in its own type (see `plain`).

        Raises:
            InputError: it is of another kind, or out of range.
        """
        value = plain(self.name, value, self.kind)
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name} must be one of {', '.join(map(repr, self.choices))}, not {value!r}").about(
                self.name
            )
        try:
            return self.option.checked(value)
        except ValueError as error:
            raise InputError(f"{self.name}: {error}").about(self.name) from error


@cache
def declared_options(group: type[Any]) -> Mapping[str, Declared]:
    """The options that a class declares or inherits, by name; those of its bases first."""
    hints = get_type_hints(group, include_extras=True)
    known: Any = getattr(group, "model_fields", None) or vars(group)["__dataclass_fields__"]
    found = {
        name: declared_option(name, hints[name], known[name].default) for name in field_names(group) if name in known
    }
    return {name: option for name, option in found.items() if option is not None}


def declared_option(name: str, annotation: Any, default: Any = None) -> Declared | None:
    """The option that an annotation declares, if it declares one."""
    kind, metadata = _parts(annotation)
    option = next((part for part in metadata if isinstance(part, Option)), None)
    return None if option is None else Declared(name, kind, default, option)


def plain(name: str, value: Any, kind: Any) -> Any:
    """A value in its own type: any sequence as a tuple, a text where there may be several as one of them, a number of
    NumPy's as Python's. Kinds other than bool, int, float, str and tuples of these are left as they are.

    Raises:
        InputError: it is of another kind.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if get_origin(kind) is tuple:
        if isinstance(value, bytes) or not isinstance(value, Sequence):
            raise InputError(f"{name} is a list of values, not {value!r:.60}; write {name}=[...]").about(name)
        parts = cast("Sequence[Any]", (value,) if isinstance(value, str) else value)
        first, *others = get_args(kind)
        kinds = [first] * len(parts) if others == [...] else [first, *others]
        if len(kinds) != len(parts):
            raise InputError(f"{name} has {len(kinds)} values, not {len(parts)}: {value!r:.60}").about(name)
        return tuple(map(partial(plain, name), parts, kinds))
    wanted, words = _KINDS.get(kind, (object, ""))
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind in (int, float)):
        raise InputError(f"{name} {words}, not {value!r:.60}").about(name)
    return float(value) if kind is float else value


_KINDS: Mapping[Any, tuple[type[Any], str]] = {
    bool: (bool, "is True or False"),
    int: (int, "must be a whole number"),
    float: (Real, "must be a number"),
    str: (str, "must be a text"),
}


def plain_fields(record: object) -> None:
    """Give the fields of a frozen dataclass their own types (see `plain`), None by default apart.

    Raises:
        InputError: a field is of another kind.
    """
    hints = get_type_hints(type(record))
    for one in fields(record):  # type: ignore[arg-type]  # it is a dataclass
        if (value := getattr(record, one.name)) is not None or one.default is not None:
            object.__setattr__(record, one.name, plain(one.name, value, _parts(hints[one.name])[0]))


def require_valid(options: object, group: type[Any] | None = None) -> None:
    """Give options (of a class of options that they inherit) their own types, and refuse values that are none for them,
    None by default apart.

    Raises:
        InputError: there is one.
    """
    for name, option in declared_options(group or type(options)).items():
        value = getattr(options, name)
        if value is not None or option.default is not None:
            object.__setattr__(options, name, option.require(value))


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
