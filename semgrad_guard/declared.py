"""Settings as fields: read off their declarations in `semgrad_guard.settings`, and checked by them.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from semgrad_guard.errors import DataFileError, InputError

R = TypeVar("R")


@dataclass(frozen=True)
class Bounds:
    """In an annotation the range of a number, or of each of several values; with `open_below` its lower end is outside.
    `check` raises a ValueError for a further wrong value. pydantic checks by it, too."""

    low: float = -math.inf
    high: float = math.inf
    open_below: bool = False
    check: Callable[[Any], object] | None = None

    def __contains__(self, number: Any) -> bool:
        above = self.low < number if self.open_below else self.low <= number
        return above and number <= self.high and abs(number) < math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        least = f"above {self.low:g}" if self.open_below else f"at least {self.low:g}"
        return least if math.isinf(self.high) else f"{least} and at most {self.high:,}"

    def checked(self, value: Any) -> Any:
        """The value itself.

        Raises:
            ValueError: it is outside, or wrong.
        """
        single = () if value is None else (value,)
        parts: Iterable[Any] = cast("Any", value) if isinstance(value, (tuple, list, frozenset)) else single
        for part in parts:
            if isinstance(part, Real) and part not in self:
                raise ValueError(f"{part} is out of range: it is {self}")
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


@dataclass(frozen=True)
class Declared:
    """A setting where it is declared: its name, its type without None, its default and its bounds."""

    name: str
    kind: Any
    default: Any
    bounds: Bounds

    def require(self, value: Any) -> Any:
        """The value in its own type (see `plain`).

        Raises:
            InputError: it is of another kind, or out of range.
        """
        value = plain(self.name, value, self.kind)
        choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        if choices and value not in choices:
            raise InputError(f"{self.name} must be one of {', '.join(map(repr, choices))}, not {value!r}").about(
                self.name
            )
        try:
            return self.bounds.checked(value)
        except ValueError as error:
            raise InputError(f"{self.name}: {error}").about(self.name) from error


@cache
def declared_options(group: type[Any]) -> Mapping[str, Declared]:
    """The settings that a class declares or inherits, by name."""
    hints = get_type_hints(group, include_extras=True)
    known: Any = getattr(group, "model_fields", None) or {one.name: one for one in fields(group)}
    return {name: declared(name, hints[name], one.default) for name, one in known.items()}


def declared(name: str, annotation: Any, default: Any = None) -> Declared:
    """The setting of an annotation."""
    kind, metadata = _parts(annotation)
    bounds = next((part for part in metadata if isinstance(part, Bounds)), Bounds())
    return Declared(name, kind, default, bounds)


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


def names_in(given: object, option: str) -> frozenset[str]:
    """The names of an option.

    Raises:
        InputError: it is one text, or no collection of names.
    """
    several = cast("Collection[Any]", given) if isinstance(given, Collection) and not isinstance(given, str) else [None]
    if not all(isinstance(one, str) for one in several):
        raise InputError(f'{option} is a list of names, such as ["search"], not {given!r}')
    return frozenset(several)


def pairs_in(given: object, option: str, form: str) -> list[tuple[Any, Any]]:
    """The pairs of an option, whose form the words tell.

    Raises:
        InputError: it holds something else.
    """
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise InputError(f"{option} is a list of pairs of {form}, not {given!r:.60}")
    pairs = list(cast("Iterable[Any]", given))
    for one in pairs:
        if not isinstance(one, tuple | list) or len(cast("Sequence[Any]", one)) != 2:
            raise InputError(f"{option} holds pairs of {form}, not {one!r:.60}")
    return [(first, second) for first, second in pairs]


def is_score(value: float | None) -> TypeGuard[float]:
    """Whether a value is a finite number, and so a score.

    Raises:
        InputError: it is neither a number nor None.
    """
    try:
        if not isinstance(value, bool):
            return value is not None and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"an uncertainty is a number or None, not {value!r}")


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


def read_record(kind: type[R], path: Path, *, title: str, advice: str) -> R:
    """A record that a command has written as JSON.

    Raises:
        DataFileError: the file cannot be read, or is not such a record; the message ends with the advice.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise DataFileError(f"Cannot read the {title} {path}: {error.strerror or error}. {advice}") from error
    except ValidationError as error:
        raise DataFileError(f"{path} is not a {title}: {first_fault(error)}. {advice}") from error


def first_fault(error: ValidationError, *, place: bool = True) -> str:
    """The first thing that is wrong with a value, in words; with its place in it."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"])) if place else ""
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"


@contextmanager
def naming_faults() -> Generator[None]:
    """A block in which a value that pydantic refuses is an error of ours, as in every other place.

    Raises:
        InputError: there is one.
    """
    try:
        yield
    except ValidationError as error:
        raise InputError(first_fault(error)) from error


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None, and the metadata next to it."""
    if get_origin(annotation) is Annotated:
        kind, further = _parts(get_args(annotation)[0])
        return kind, (*annotation.__metadata__, *further)
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return _parts(members[0]) if len(members) == 1 else (annotation, ())
    return annotation, ()
