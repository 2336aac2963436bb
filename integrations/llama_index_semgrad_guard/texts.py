"""Whether texts share words, and whether an answer is what LlamaIndex makes of a model's texts.

Code that passes a text on may have cut it, or changed its case and its marks. A class or a method of LlamaIndex's name
proves nothing either: subclasses, parsers, wrappers and validators may have put other words into what it returns. So
words are compared, texts joined and structures read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, cast

from llama_index.core.output_parsers.utils import extract_json_str
from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

EMPTY = "Empty Response"
"""The text of LlamaIndex's synthesizers where no model has answered."""
_BETWEEN = "\n---------------------\n"
_NUMBER = re.compile(r"Response \d+: ")
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """A text's words, for comparing."""
    return _WORD.findall(text.casefold())


def repeats(text: str, written: str, *, words: int = 4) -> bool:
    """Whether one of two texts is the other, or is a part of it and has so many words; case and marks aside."""
    return shares(words_of(text), words_of(written), words=words)


def shares(ours: Sequence[str], theirs: Sequence[str], *, words: int = 4) -> bool:
    """As `repeats`, of the words of texts. Of four words and more, the first and the last may have been cut."""
    few, many = sorted((ours, theirs), key=len)
    short, long = " ".join(few), " ".join(many)
    if len(few) < max(words, 1):
        return bool(few) and short == long
    return short in long if len(few) > 3 else f" {short} " in f" {long} "


def joined(text: str, parts: Sequence[str]) -> bool:
    """Whether a text puts these parts side by side, as accumulating synthesizers do, in whatever order."""
    joined_parts = text.split(_BETWEEN)
    numbered = all(part.startswith(f"Response {number}: ") for number, part in enumerate(joined_parts, start=1))
    unnumbered = [_NUMBER.sub("", part, count=1) for part in joined_parts]
    return numbered and sorted(unnumbered) == sorted(part or EMPTY for part in parts)


def filtered(text: str, written: str) -> bool:
    """Whether a text is the answer within a model's JSON for a `Refine` with answer filtering."""
    data = _data(written)
    return isinstance(data, Mapping) and cast("Mapping[str, Any]", data).get("answer") == text


def structured(structure: BaseModel, text: str, written: str) -> bool:
    """Whether a model wrote every value of a structure, and of the text that the structure is shown as."""
    read = _is_read_from(structure, _data(written))
    return read and _data(text) == to_jsonable_python(_plain(structure), fallback=str)


def _data(written: str) -> Any:
    """The JSON in a text, None where there is none."""
    try:
        return json.loads(extract_json_str(written))
    except ValueError:
        return None


def _is_read_from(value: Any, data: Any) -> bool:
    """Whether a value is read from this JSON."""
    if isinstance(value, RootModel):
        return _is_read_from(cast("Any", value).root, data)
    if isinstance(value, BaseModel):
        return isinstance(data, Mapping) and _fields_are_read_from(value, cast("Mapping[str, Any]", data))
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        if not isinstance(data, Mapping) or len(held) != len(cast("Mapping[str, Any]", data)):
            return False
        return all(str(key) in data and _is_read_from(inner, data[str(key)]) for key, inner in held.items())
    if isinstance(value, (list, tuple)):
        ours, theirs = cast("Sequence[Any]", value), cast("Sequence[Any]", data)
        same = isinstance(data, list) and len(ours) == len(theirs)
        return same and all(_is_read_from(one, other) for one, other in zip(ours, theirs, strict=True))
    if isinstance(value, Enum):
        return value.value == data
    if value is None or isinstance(value, str):
        return value == data
    try:  # a number, a date or the like, as pydantic reads it
        return bool(TypeAdapter[Any](cast("type[Any]", type(value))).validate_python(data) == value)
    except (ValidationError, PydanticUserError):
        return False


def _fields_are_read_from(structure: BaseModel, data: Mapping[str, Any]) -> bool:
    fields = type(structure).model_fields
    seen = False
    for name, value in structure:
        field = fields.get(name)
        names = (name,) if field is None else (name, field.alias, field.validation_alias)
        key = next((key for key in names if isinstance(key, str) and key in data), None)
        if key is None and field is not None and field.default == value:
            continue  # the class's own, for every answer
        if key is None or not _is_read_from(value, data[key]):
            return False
        seen = True
    return seen or not fields


def _plain(value: Any) -> Any:
    """A structure as the values in it; serializers and computed fields add nothing."""
    if isinstance(value, RootModel):
        return _plain(cast("Any", value).root)
    if isinstance(value, BaseModel):
        return {name: _plain(inner) for name, inner in value}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    return value
