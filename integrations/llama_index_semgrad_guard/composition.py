"""How LlamaIndex itself makes an answer of a model's texts, made anew from these texts: is that what was delivered?

A class or a method of LlamaIndex's name proves nothing: subclasses, parsers, wrappers and validators may have put other
words into what it returns. So the texts are joined, and the structures compared, here.
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
"""What LlamaIndex's synthesizers say where no model has said anything."""
_BETWEEN = "\n---------------------\n"
_NUMBER = re.compile(r"Response \d+: ")


def joined(text: str, parts: Sequence[str]) -> bool:
    """Whether a text puts these parts side by side, as accumulating synthesizers do, in whatever order."""
    found = text.split(_BETWEEN)
    numbered = [f"Response {number}: " for number in range(1, len(found) + 1)]
    begun = all(part.startswith(number) for part, number in zip(found, numbered, strict=True))
    said = [_NUMBER.sub("", part, count=1) for part in found]
    return begun and sorted(said) == sorted(part or EMPTY for part in parts)


def filtered(text: str, written: str) -> bool:
    """Whether a text is the answer that stands in what a model wrote for a `Refine` with answer filtering."""
    data = _data(written)
    return isinstance(data, Mapping) and cast("Mapping[str, Any]", data).get("answer") == text


def structured(structure: BaseModel, text: str, written: str) -> bool:
    """Whether every value of a structure, and of the text that it is shown as, stands in what a model wrote."""
    told = _told(structure, _data(written))
    return told and _data(text) == to_jsonable_python(_plain(structure), fallback=str)


def _data(written: str) -> Any:
    """The JSON in a text, None where there is none."""
    try:
        return json.loads(extract_json_str(written))
    except ValueError:
        return None


def _told(value: Any, data: Any) -> bool:
    if isinstance(value, RootModel):
        return _told(cast("Any", value).root, data)
    if isinstance(value, BaseModel):
        return isinstance(data, Mapping) and _fields_told(value, cast("Mapping[str, Any]", data))
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        if not isinstance(data, Mapping) or len(held) != len(cast("Mapping[str, Any]", data)):
            return False
        return all(str(key) in data and _told(inner, data[str(key)]) for key, inner in held.items())
    if isinstance(value, (list, tuple)):
        ours, theirs = cast("Sequence[Any]", value), cast("Sequence[Any]", data)
        same = isinstance(data, list) and len(ours) == len(theirs)
        return same and all(_told(one, other) for one, other in zip(ours, theirs, strict=True))
    if isinstance(value, Enum):
        return value.value == data
    return value == data if value is None or isinstance(value, str) else _is_read_as(value, data)


def _fields_told(structure: BaseModel, data: Mapping[str, Any]) -> bool:
    fields = type(structure).model_fields
    seen = False
    for name, value in structure:
        field = fields.get(name)
        names = (name,) if field is None else (name, field.alias, field.validation_alias)
        key = next((each for each in names if isinstance(each, str) and each in data), None)
        if key is None and field is not None and field.default == value:
            continue  # a class says so, for every answer
        if key is None or not _told(value, data[key]):
            return False
        seen = True
    return seen or not fields


def _is_read_as(value: Any, data: Any) -> bool:
    """Whether a number, a date or the like is how pydantic reads what was written."""
    try:
        return bool(TypeAdapter[Any](cast("type[Any]", type(value))).validate_python(data) == value)
    except (ValidationError, PydanticUserError):
        return False


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
