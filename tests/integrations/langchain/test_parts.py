"""Scores of single calls and of single values: of a local model, and by reported log-probabilities."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_semgrad_guard import GuardedChatModel, LowConfidenceError, UncertaintyRouterCallback
from semgrad_guard import Calibration, Policy, Verdict
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import GreedyNLL
from semgrad_guard.guard import unscored
from semgrad_guard.guard.decision import without_values
from semgrad_guard.guard.parts import allows_null, calibrate_fields, fields_of, has_names, scored_calls
from semgrad_guard.guard.question import RecordedDraft, recording
from semgrad_guard.records import FieldVerdict, PromptForm, ToolCall

from .scripted import Scripted
from .support import Ear, verdict_of
from .ways import collect


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
    verdict = verdict_of(answering(message).bind(response_format=FORM).invoke("q"))
    assert [(one.path, one.nullable) for one in verdict.fields] == [(("name",), False), (("country",), True)]
    first, second = (one.uncertainty for one in verdict.fields)
    assert first is not None
    assert second is not None
    assert first > 4 > 1 > second
    assert "Xanten" not in json.dumps(verdict.metadata())
    plain = verdict_of(answering(message).invoke("q"))
    assert plain.fields == ()


def test_calls_of_a_served_answer() -> None:
    """Each by the tokens that spell it; one that the reported tokens do not spell has no score."""
    args = [{"city": "Rome", "nights": 2}, {"city": "Xanten", "nights": 3}, {"city": "Oslo", "nights": 1}]
    calls: Any = [{"name": "book", "args": one, "id": f"c{n}"} for n, one in enumerate(args)]
    raw = "\n".join(f"<tool_call>{json.dumps({'name': 'book', 'arguments': one})}</tool_call>" for one in args[:2])
    message = AIMessage("", tool_calls=calls, response_metadata={"logprobs": reported(raw, "X")})
    verdict = verdict_of(answering(message).bind_tools([book]).invoke("q"))
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


@pytest.mark.parametrize(
    ("path", "named"),
    [((), True), (("a",), True), (("e", 1), True), (("g", "zip"), True), (("g", "x"), False), (("z",), False),
     (("z", 0), False), (("i", "x"), False)],
)  # fmt: skip
def test_where_a_schema_has_the_name(path: tuple[str | int, ...], named: bool) -> None:
    assert has_names(SCHEMA, path) is named
    for outer in ("anyOf", "oneOf", "allOf"):
        assert has_names({outer: [{"type": "null"}, SCHEMA], "$defs": SCHEMA["$defs"]}, path) is named


# Decisions about values.


def drafted(number: int, doubts: str) -> AIMessage:
    """A city and its country, one of them doubtful ("X"), as a message."""
    text = json.dumps({"name": f"{'X' if 'n' in doubts else 'a'}{number}", "country": "X" if "c" in doubts else "b"})
    return AIMessage(text, response_metadata={"logprobs": reported(text, "X")})


class Cities(BaseModel):
    name: str | None
    country: str | None


def form_of(schema: type[BaseModel]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": schema.__name__, "schema": schema.model_json_schema()}}


@pytest.fixture(scope="module")
def by_field() -> Calibration:
    """From 60 answers, of which every third has a doubtful, wrong country."""
    messages = iter([drafted(n, "c" if n % 3 == 0 else "") for n in range(60)])
    chat = GuardedChatModel(Scripted(script=lambda _: next(messages), logprobs=None), None, estimator=GreedyNLL())
    with recording() as recorder:
        for n in range(60):
            chat.bind(response_format=form_of(Cities)).invoke(f"city {n}")
    rights = [{"name": f"a{n}", "country": "b"} for n in range(60)]
    made = calibrate_fields(zip(recorder.drafts, rights, strict=True), alpha=0.2, delta=0.1)
    assert made.threshold is not None
    assert made.threshold < 3
    assert made.sentences is not None
    assert (made.sentences.n, made.sentences.wrong) == (120, 20)
    return made


def extracting(by_field: Calibration, message: AIMessage, **options: Any) -> GuardedChatModel:
    router = UncertaintyRouterCallback(Policy.from_calibration(by_field), **options)
    return GuardedChatModel(Scripted(script=message, logprobs=None), router, estimator=GreedyNLL())


@pytest.mark.parametrize(
    ("doubts", "mode", "country", "actions"),
    [
        ("c", "enforce", None, ["deliver", "null"]),
        ("c", "annotate", "X", ["deliver", "null"]),
        ("", "enforce", "b", ["deliver", "deliver"]),
    ],
)
def test_null_stands_where_a_value_is_withheld(
    by_field: Calibration, doubts: str, mode: Any, country: str | None, actions: list[str]
) -> None:
    ear, guard = Ear(), extracting(by_field, drafted(7, doubts), mode=mode)
    message = guard.bind(response_format=form_of(Cities)).invoke("city 7", {"callbacks": [ear]})
    assert PydanticOutputParser(pydantic_object=Cities).invoke(message) == Cities(name="a7", country=country)
    verdict = verdict_of(message)
    assert ([one.action for one in verdict.fields], verdict.action) == (actions, "answer")
    assert (verdict.promised, verdict.details.enforced) == (True, mode == "enforce")
    assert ('"X' in message.text) is (country == "X")
    assert any('"X' in event or '\\"X' in event for event in ear.events) is (country == "X")


@pytest.mark.parametrize("is_async", [False, True])
def test_partial_objects_of_a_stream_never_show_a_withheld_value(by_field: Calibration, is_async: bool) -> None:
    chain = extracting(by_field, drafted(7, "c")).bind(response_format=form_of(Cities)) | JsonOutputParser()
    pieces = collect(chain.astream("city 7")) if is_async else list(chain.stream("city 7"))
    assert pieces[-1] == {"name": "a7", "country": None}
    assert {piece.get("country") for piece in pieces} == {None}


@pytest.mark.parametrize(("doubts", "schema"), [("n", City), ("nc", Cities)])
def test_a_value_that_is_owed_withholds_the_answer(by_field: Calibration, doubts: str, schema: type[BaseModel]) -> None:
    """Where null is not allowed in its place, and where nothing else would go out."""
    with pytest.raises(LowConfidenceError) as caught:
        extracting(by_field, drafted(7, doubts)).bind(response_format=form_of(schema)).invoke("city 7")
    assert "X7" not in str(caught.value)


class Ages(BaseModel):
    name: str | None
    ages: dict[str, int] | None
    tags: list[str] | None = None


@pytest.mark.parametrize("doubted", ["key", "value", "empty", "none"])
def test_names_and_empty_values_are_judged(by_field: Calibration, doubted: str) -> None:
    """A name that the schema does not have belongs to its value, and no null hides it: the answer is withheld whole."""
    name, age, tags = ("Xo" if doubted == "key" else "Jo"), (-4 if doubted == "value" else 4), []
    text = json.dumps({"name": "a7", "ages": {"Al": 1, name: age}, "tags": tags})
    log = reported(text, "X" if doubted == "key" else "-" if doubted == "value" else "[" if doubted == "empty" else "~")
    guard = extracting(by_field, AIMessage(text, response_metadata={"logprobs": log}))
    if doubted in ("key", "value"):
        with pytest.raises(LowConfidenceError) as caught:
            guard.bind(response_format=form_of(Ages)).invoke("city 7")
        assert "Xo" not in str(caught.value)
        return
    message = guard.bind(response_format=form_of(Ages)).invoke("city 7")
    assert json.loads(message.text)["tags"] == (None if doubted == "empty" else [])
    found = {one.path: one.action for one in verdict_of(message).fields}
    assert found == {("name",): "deliver", ("ages", "Al"): "deliver", ("ages", "Jo"): "deliver",
                     ("tags",): "null" if doubted == "empty" else "deliver"}  # fmt: skip


@pytest.mark.parametrize("doubted", ["u", "~"])
def test_a_null_that_the_model_wrote_is_judged_like_any_value(by_field: Calibration, doubted: str) -> None:
    text = '{"name": "a7", "country": null}'
    message = AIMessage(text, response_metadata={"logprobs": reported(text, doubted)})
    log: Any = message.response_metadata["logprobs"]["content"]
    for one in log[: len('{"name": "a7", "country":') // 2]:  # a doubt in the names is none in the value
        one["logprob"] = -0.01
    found = verdict_of(extracting(by_field, message).bind(response_format=form_of(Cities)).invoke("city 7"))
    assert [one.action for one in found.fields] == ["deliver", "null" if doubted == "u" else "deliver"]


def test_an_answer_without_values_is_unscored(by_field: Calibration) -> None:
    message = AIMessage("Hello.", response_metadata={"logprobs": reported("Hello.", "X")})
    found = extracting(by_field, message, abstain_message="NO").invoke("city 7")
    assert found.text == "NO"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(st.sampled_from('aé"\\{ '), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES.filter(lambda value: isinstance(value, dict | list)), draw=st.data())
def test_withheld_values_are_null_and_all_others_as_they_were(value: Any, draw: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=draw.draw(st.booleans()))
    fields = tuple(
        FieldVerdict(path=one.path, action=draw.draw(st.sampled_from(["deliver", "null"]))) for one in fields_of(text)
    )
    verdict = Verdict.of(status="scored", action="answer", text=text, estimator="e", model="m", fields=fields)
    found = json.loads(without_values(verdict).text)
    for one in fields_of(text):
        holder = found
        for key in one.path:
            holder = holder[key]
        withheld = any(own.action == "null" for own in fields if own.path == one.path)
        assert holder == (None if withheld else one.value)


SPELLED = '{"name": "pay", "arguments": {"to": "Bob"}}'


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (f"I could write {SPELLED}. <tool_call>{SPELLED}</tool_call>", [SPELLED, SPELLED]),
        ('The tool pay takes, for example, {"to": "Bob"}.', []),
        ('payments {"to": "Bob"}', []),
        ('[TOOL_CALLS]pay[ARGS]{"to": "Bob"}', ['pay[ARGS]{"to": "Bob"}']),
        ('to=functions.pay <|x|>json<|message|>{"to": "Bob"}', ['pay <|x|>json<|message|>{"to": "Bob"}']),
        ('functions.pay:0<|argument_begin|>{"to": "Bob"}', ['pay:0<|argument_begin|>{"to": "Bob"}']),
        ('Action: pay\nAction Input: {"to": "Bob"}', ['pay\nAction Input: {"to": "Bob"}']),
    ],
)
def test_a_call_has_the_greatest_score_of_the_places_that_spell_it(text: str, places: list[str]) -> None:
    """A sure quotation in the text next to it decides nothing."""
    found = list[str]()

    def scored(spans: Any) -> list[float]:
        found.extend(text[start:end] for start, end in spans)
        return [float(start) for start, _ in spans]

    (verdict,) = scored_calls(text, [ToolCall("pay", {"to": "Bob"})], scored)
    assert found == places
    assert verdict.uncertainty == (float(text.rindex(places[-1])) if places else None)


def test_values_are_calibrated_in_any_text_around_them() -> None:
    """A fence or words around the JSON, as the guard takes them."""
    drafts, form = list[Any](), PromptForm(text="Where?", tokens=2, roles=("user",), user_text="Where?")
    for number in range(30):
        text = 'Here: ```json\n{"name": "Xanten", "country": "Germany"}\n```'
        draft = unscored(text, reason="none").revised(
            fields=(FieldVerdict(path=("name",), uncertainty=0.1 + number / 100),)
        )
        drafts.append((RecordedDraft(draft, form), {"name": "Xanten" if number < 28 else "Bonn"}))
    assert calibrate_fields(drafts, alpha=0.2, delta=0.1).n_wrong == 2


RECORDED = RecordedDraft(
    unscored('{"name": "Rome", "country": null}', reason="none").revised(
        fields=(FieldVerdict(path=("name",), uncertainty=0.1),)
    ),
    PromptForm(text="Where?", tokens=2, roles=("user",), user_text="Where?"),
)


@pytest.mark.parametrize(
    ("graded", "words"),
    [
        (None, "graded is a list of pairs"),
        ([RECORDED], "graded holds pairs"),
        ([("Rome", {"name": "Rome"})], "recorded draft"),
        ([({"name": "Rome"}, RECORDED)], "recorded draft"),
        ([(RECORDED, '{"name": "Rome"}')], "a dict, a list or a pydantic model"),
        ([(RECORDED, True)], "a dict, a list or a pydantic model"),
        ([(RECORDED, None)], "a dict, a list or a pydantic model"),
        ([], "No draft has values"),
    ],
)
def test_what_is_no_graded_draft_is_refused(graded: Any, words: str) -> None:
    with pytest.raises((InputError, CalibrationError), match=words):
        calibrate_fields(graded, alpha=0.2, delta=0.1)


def test_a_right_object_may_be_of_a_pydantic_model() -> None:
    rights = [City(name="Rome", country=None)] * 20 + [City(name="Bonn", country=None)]
    made = calibrate_fields([(RECORDED, right) for right in rights], alpha=0.5, delta=0.1)
    assert (made.n, made.n_wrong) == (21, 1)


def test_a_text_around_withheld_values_does_not_go_out() -> None:
    text = 'The country is Xanadu: {"name": "Xanten", "country": "Xanadu"} (Xanadu)'
    fields = (FieldVerdict(path=("name",)), FieldVerdict(path=("country",), action="null"))
    found = without_values(unscored(text, reason="none").revised(fields=fields))
    assert found.text == '{"name": "Xanten", "country": null}'
    call = ToolCall("City", {"name": "Xanten", "country": "Xanadu"})
    draft = unscored("I found Xanadu.", reason="none").revised(tool_calls=(call,), fields=fields)
    found = without_values(draft)
    assert (found.text, found.tool_calls[0].arguments["country"]) == ("", None)
