"""The fields of a JSON text: every value that holds no others, with its path and its place in the text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

Path = tuple[str | int, ...]
"""The place of a value: names of objects and places in arrays, as in ("cities", 0, "name")."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\s\[\]{},:"]+')


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
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    _, end = _DECODER.raw_decode(text, begin)
    found, path = list[Field](), list[Any]()  # of an object whose next name is yet to come the last entry is None
    names: int | None = None
    before = ""

    def note(value: Any, start: int, end: int) -> None:
        nonlocal names
        found.append(Field(tuple(path), value, start, end, start if names is None else names))
        names = None

    for token in _TOKEN.finditer(text, begin, end):
        match token[0]:
            case "{":
                path.append(None)
            case "[":
                path.append(0)
            case "}" | "]":
                path.pop()
                if before in ("{", "["):
                    note(json.loads(before + token[0]), text.rindex(before, 0, token.start()), token.end())
            case ",":
                path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
            case written:
                value = json.loads(written)
                if path and path[-1] is None:
                    path[-1], names = value, token.start() if names is None else names
                else:
                    quotes = int(isinstance(value, str) and bool(value))
                    note(value, token.start() + quotes, token.end() - quotes)
        before = token[0]
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # else it reads NaN and Infinity
