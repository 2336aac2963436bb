"""The fields of a JSON text: every value that holds no others, with its path and its place in the text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue]
from typing import Any, cast

Path = tuple[str | int, ...]
"""The place of a value: names of objects and places in arrays, as in ("cities", 0, "name")."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class Field:
    """One value of a JSON text: text[start:end], without a string's quotes (an empty one is its quotes).

    `names` is where the names begin that lead to it from the value before it.
    """

    path: Path
    value: Any
    start: int
    end: int
    names: int


def fields_of(text: str, at: int = 0) -> list[Field]:
    """The fields of the JSON value that begins at a place of a text, in the text's order.

    Empty objects and arrays are fields. Of a name that an object has twice both are listed, with one path.

    Raises:
        ValueError: no JSON value begins there, or it is cut.
    """
    reader = _Reader(text)
    reader.value(_space(text, at), ())
    return reader.fields


class _Reader:
    """Reads JSON values of one text, and notes the fields that it passes."""

    def __init__(self, text: str) -> None:
        self.text, self.fields = text, list[Field]()
        self._names: int | None = None

    def value(self, at: int, path: Path) -> int:
        """Read the value at a place; returns where it ends."""
        opening, quotes = self.text[at : at + 1], 0
        if opening in ("{", "["):
            return self._members(at, path, named=opening == "{")
        if opening == '"':
            value, end = self._string(at)
            quotes = int(end > at + 2)
        else:
            match = _PLAIN.match(self.text, at)
            if match is None:
                raise ValueError(f"no JSON value begins at {at}")
            value, end = json.loads(match[0]), match.end()
        self._note(path, value, at + quotes, end - quotes)
        return end

    def _note(self, path: Path, value: Any, start: int, end: int) -> None:
        self.fields.append(Field(path, value, start, end, start if self._names is None else self._names))
        self._names = None

    def _members(self, at: int, path: Path, *, named: bool) -> int:
        opened, closing, number, at = at, "}" if named else "]", 0, _space(self.text, at + 1)
        while self.text[at : at + 1] != closing:
            if number:
                at = self._passed(at, ",")
            key: str | int = number
            if named:
                self._names = at if self._names is None else self._names
                key, at = self._string(at)
                at = self._passed(_space(self.text, at), ":")
            at, number = _space(self.text, self.value(at, (*path, key))), number + 1
        if not number:
            self._note(path, {} if named else [], opened, at + 1)
        return at + 1

    def _string(self, at: int) -> tuple[str, int]:
        self._passed(at, '"')
        return cast("tuple[str, int]", scanstring(self.text, at + 1, True))

    def _passed(self, at: int, mark: str) -> int:
        if self.text[at : at + 1] != mark:
            raise ValueError(f"{mark!r} is missing at {at}")
        return _space(self.text, at + 1)


def _space(text: str, at: int) -> int:
    """The first place from here on without white space."""
    return cast("re.Match[str]", _SPACE.match(text, at)).end()
