"""The parts of an answer that a program takes by themselves: each tool call, and each value of a structured answer.

A part has the tokens that spell it and the one that ends it, given everything before them. On 330 values of 100 tool
calls of SmolLM2 a value's own likelihood tells wrong from right with an AUROC of .91, the whole call's with .66 to .89.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from semgrad_guard.engine.fields import Field, Path, fields_of
from semgrad_guard.engine.sentences import Span
from semgrad_guard.records import CallVerdict, FieldVerdict, ToolCall

Scored = Callable[[Sequence[Span]], Sequence[float | None]]
"""The uncertainties of pieces of an answer's text, in its order; None for one that has none."""
Schema = Mapping[str, Any]

_ARGUMENTS = ("arguments", "parameters")
"""The names of a call's arguments in its JSON."""


@dataclass(frozen=True)
class Structure:
    """The JSON that an answer owes: the schema of its text, or those of the arguments of calls, by the tools' names."""

    text: Schema | None = None
    arguments: Mapping[str, Schema] = field(default_factory=dict[str, Schema])


def scored_calls(text: str, calls: Sequence[ToolCall], scored: Scored) -> tuple[CallVerdict, ...]:
    """The calls of an answer with their scores; None for a call that its text does not spell as JSON."""
    spans, at = list[Span | None](), 0
    for call in calls:
        found = _place_of(text, call, at)
        spans.append(found)
        at = at if found is None else found[1]
    values = iter(scored([span for span in spans if span is not None]))
    return tuple(
        CallVerdict(digest=call.digest, uncertainty=None if span is None else next(values))
        for call, span in zip(calls, spans, strict=True)
    )


def scored_fields(
    text: str, calls: Sequence[ToolCall], structure: Structure, scored: Scored
) -> tuple[FieldVerdict, ...]:
    """The values of a structured answer with their scores; of a call, those of its arguments.

    None where the answer is no whole JSON, or is several calls.
    """
    if not calls:
        begin, schema = min((text.find(mark) for mark in "{[" if mark in text), default=len(text)), structure.text
        found = _fields(text, begin)
    elif len(calls) == 1 and (place := _place_of(text, calls[0], 0)) is not None:
        found, schema = _argument_fields(text, place, calls[0]), structure.arguments.get(calls[0].name)
    else:
        return ()
    return tuple(
        FieldVerdict(path=one.path, uncertainty=value, nullable=allows_null(schema, one.path))
        for one, value in zip(found, scored([(one.start, one.end) for one in found]), strict=True)
    )


def _fields(text: str, at: int) -> list[Field]:
    try:
        return fields_of(text, at)
    except ValueError:
        return []


def _place_of(text: str, call: ToolCall, at: int) -> Span | None:
    """Where a text spells a call, from a place on: its JSON, with the name before it where that stands outside."""
    decoder, own, begin = json.JSONDecoder(), dict(call.arguments), text.find("{", at)
    while begin >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except ValueError:
            value, end = None, begin + 1
        if value == own and (name := text.rfind(call.name, at, begin)) >= 0:
            return name, end
        if isinstance(value, dict) and _calls(cast("dict[str, Any]", value), call.name, own):
            return begin, end
        begin = text.find("{", begin + 1)
    return None


def _calls(value: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> bool:
    function = value.get("function", value)
    if not isinstance(function, Mapping):
        return False
    held = cast("Mapping[str, Any]", function)
    return held.get("name") == name and any(held.get(key) == arguments for key in _ARGUMENTS)


def _argument_fields(text: str, place: Span, call: ToolCall) -> list[Field]:
    """The fields of a call's arguments, their paths from there on."""
    begin = text.index("{", place[0])
    found = _fields(text, begin)
    if json.JSONDecoder().raw_decode(text, begin)[0] == dict(call.arguments):
        return found
    inside = [one for one in found if set(one.path) & set(_ARGUMENTS)]
    return [
        replace(one, path=one.path[1 + min(map(one.path.index, set(one.path) & set(_ARGUMENTS))) :]) for one in inside
    ]


def allows_null(schema: Schema | None, path: Path) -> bool:
    """Whether a JSON schema allows null at a place; what it does not describe may be anything."""
    return schema is None or _allows(schema, path, schema)


def _allows(schema: Any, path: Path, root: Schema) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    known = cast("Mapping[str, Any]", schema)
    if isinstance(known.get("$ref"), str):
        return _allows(_referred(known["$ref"], root), path, root)
    if "allOf" in known and not all(_allows(one, path, root) for one in known["allOf"]):
        return False
    for choice in ("anyOf", "oneOf"):
        if choice in known and not any(_allows(one, path, root) for one in known[choice]):
            return False
    if path:
        return _allows(_member(known, path[0]), path[1:], root)
    kinds = known.get("type")
    by_type = kinds is None or kinds == "null" or (isinstance(kinds, list) and "null" in kinds)
    by_value = None in known["enum"] if "enum" in known else known.get("const") is None
    return by_type and by_value


def _member(schema: Mapping[str, Any], key: str | int) -> Any:
    """The schema of a member of an object or an array; True where it is not described."""
    if isinstance(key, str):
        return schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
    first = schema.get("prefixItems", ())
    return first[key] if key < len(first) else schema.get("items", True)


def _referred(reference: str, root: Schema) -> Any:
    """The part of a schema that a local reference names; True where there is none."""
    found: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(found, Mapping):
            return True
        found = cast("Mapping[str, Any]", found).get(name.replace("~1", "/").replace("~0", "~"), True)
    return found


# The object that goes out.


def without_withheld(value: Any, fields: Sequence[FieldVerdict]) -> Any:
    """A JSON value with null in the place of each field that is withheld."""
    found = json.loads(json.dumps(value))
    for one in fields:
        if one.action == "null":
            holder = found
            for key in one.path[:-1]:
                holder = holder[key]
            holder[one.path[-1]] = None
    return found
