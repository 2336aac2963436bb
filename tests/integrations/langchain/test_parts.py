"""Scores of single calls and of single values: of a local model, and by reported log-probabilities."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_semgrad_guard import GuardedChatModel, LowConfidenceError, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Policy
from semgrad_guard.estimators import GreedyNLL
from semgrad_guard.guard.parts import allows_null

from .scripted import Scripted


class City(BaseModel):
    name: str
    country: str | None


@tool
def book(city: str, nights: int) -> str:
    """Book a room."""
    return f"{city}: {nights}"


FORM = {"type": "json_schema", "json_schema": {"name": "City", "schema": City.model_json_schema()}}


def reported(text: str, doubted: str) -> Any:
    """Log-probabilities by pieces of two letters: -4 where a piece holds the doubted letter, else -.01."""
    content = []
    for token in re.findall(r"(?s)..?", text):
        one = {"token": token, "bytes": list(token.encode()), "logprob": -4.0 if doubted in token else -0.01}
        content.append({**one, "top_logprobs": [one]})
    return {"content": content}


def answering(message: AIMessage, **options: Any) -> GuardedChatModel:
    return GuardedChatModel(Scripted(script=message, logprobs=None), None, estimator=GreedyNLL(), **options)


def test_values_of_a_served_answer() -> None:
    text = json.dumps({"name": "Xanten", "country": "Germany"})
    message = AIMessage(text, response_metadata={"logprobs": reported(text, "X")})
    verdict = get_verdict(answering(message).bind(response_format=FORM).invoke("q"))
    assert verdict is not None
    assert [(one.path, one.nullable) for one in verdict.fields] == [(("name",), False), (("country",), True)]
    first, second = (one.uncertainty for one in verdict.fields)
    assert first is not None
    assert second is not None
    assert first > 4 > 1 > second
    assert "Xanten" not in json.dumps(verdict.metadata())
    plain = get_verdict(answering(message).invoke("q"))
    assert plain is not None
    assert plain.fields == ()


def test_calls_of_a_served_answer() -> None:
    """Each by the tokens that spell it; one that the reported tokens do not spell has no score."""
    args = [{"city": "Rome", "nights": 2}, {"city": "Xanten", "nights": 3}, {"city": "Oslo", "nights": 1}]
    calls: Any = [{"name": "book", "args": one, "id": f"c{n}"} for n, one in enumerate(args)]
    raw = "\n".join(f"<tool_call>{json.dumps({'name': 'book', 'arguments': one})}</tool_call>" for one in args[:2])
    message = AIMessage("", tool_calls=calls, response_metadata={"logprobs": reported(raw, "X")})
    verdict = get_verdict(answering(message).bind_tools([book]).invoke("q"))
    assert verdict is not None
    sure, doubtful, unseen = (one.uncertainty for one in verdict.calls)
    assert sure is not None
    assert doubtful is not None
    assert sure < 1 < 4 < doubtful
    assert unseen is None


def test_a_withheld_answer_shows_neither() -> None:
    text = json.dumps({"name": "Xanten", "country": None})
    message = AIMessage(text, response_metadata={"logprobs": reported(text, "X")})
    router = UncertaintyRouterCallback(Policy(threshold=0.001))
    guard = GuardedChatModel(Scripted(script=message, logprobs=None), router, estimator=GreedyNLL())
    with pytest.raises(LowConfidenceError) as caught:
        guard.bind(response_format=FORM).invoke("q")
    assert caught.value.verdict.fields == ()
    assert "Xanten" not in str(caught.value)


SCHEMA: Any = {
    "$defs": {"Place": {"type": "object", "properties": {"zip": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}},
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"enum": ["x", None]},
        "d": {"const": "x"},
        "e": {"type": "array", "items": {"type": "number"}},
        "f": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "string"}]},
        "g": {"$ref": "#/$defs/Place"},
        "h": {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]},
        "i": {},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (("a",), False), (("b",), True), (("c",), True), (("d",), False), (("e", 1), False), (("f", 0), True),
        (("f", 1), False), (("f", 2), True), (("g", "zip"), True), (("h",), False), (("i",), True), (("i", "x"), True),
        (("z",), False), ((), False),
    ],
)  # fmt: skip
def test_where_a_schema_allows_null(path: tuple[str | int, ...], allowed: bool) -> None:
    assert allows_null(SCHEMA, path) is allowed
