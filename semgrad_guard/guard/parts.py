"""The parts of an answer: its sentences, each tool call, and each value of a structured answer.

A call or a value has the tokens that spell it and the one that ends it, given everything before them. The
score of a whole call tells little about one of its values: on 500 values of SmolLM2 the AUROC for a wrong value is .63
by its own likelihood and .46 by the whole answer's (scripts/check_fields.py, 29 November 2026).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from semgrad_guard.calibration import Binding, Calibration, calibrate_runs
from semgrad_guard.calibration.binding import FIELDS, shared_by
from semgrad_guard.decision_log.entries import DecisionSink, Facts
from semgrad_guard.declared import pairs_in
from semgrad_guard.engine.text_units import Field, Path, Span, fields_of, leanings
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.guard.decision import binding_of, doubt_of, json_in, json_start
from semgrad_guard.guard.question import RecordedDraft
from semgrad_guard.records import CallVerdict, FieldVerdict, PromptForm, Score, SentenceVerdict, ToolCall, Verdict

if TYPE_CHECKING:
    from semgrad_guard.engine.answers.answer import Evidence

# Sentences.

WITHOUT_END = "no token of the answer ends in this sentence"
OTHER_TOKENS = "the answer's tokens spell another text than it has, so that its sentences have no scores"
WITH_CALLS = "an answer that calls tools is not judged by sentence"
_PARTS = ("semgrad", "paragrad", "mean_entropy", "gnll", "max_probability")

Found = tuple[tuple[SentenceVerdict, ...], Score]
"""The undecided sentences of an answer, and the score of the whole: that of its most doubtful sentence."""


def scored_sentences(
    score: Callable[[Evidence], Score],
    answer: Evidence,
    spans: Sequence[Span],
    found: Sequence[Evidence | None],
    known: Verdict | None = None,
) -> Found:
    """Those of an answer, or of the part that has ended, in their places.

    `known` is the verdict on its beginning, which was scored while it was written; `found` is the evidence about the
    others.
    """
    sentences = list(() if known is None else known.sentences)
    milliseconds = 0.0 if known is None else known.details.scoring_ms or 0.0
    for own in found:
        one = Score(None, WITHOUT_END) if own is None else score(own)
        details = one.details or {}
        milliseconds += details.get("scoring_ms", 0.0)
        tokens = 0 if own is None else len(own.response_ids)
        scores = {name: details[name] for name in _PARTS if details.get(name) is not None}
        whole: dict[str, Any] = {"uncertainty": one.uncertainty, "scores": scores, "reason": one.reason}
        sentences.append(SentenceVerdict(start=0, end=0, tokens=tokens, **whole))
    placed = tuple(
        one.model_copy(update={"start": start, "end": end, "leans_on": before})
        for one, (start, end), before in zip(sentences, spans, leanings(answer.text, spans), strict=True)
    )
    details = {"scored_tokens": len(answer.response_ids), "scoring_ms": round(milliseconds, 3)}
    return placed, Score(*most_doubtful(placed), details)


def most_doubtful(sentences: Sequence[SentenceVerdict]) -> tuple[float | None, str | None]:
    """The score of an answer by its sentences; where one of them has none, the reason."""
    own = [one.uncertainty for one in sentences if one.uncertainty is not None]
    reason = next((one.reason for one in sentences if one.uncertainty is None), None)
    return (None if reason else max(own)), reason


# Calls, and values of structures.

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


def scored_parts(
    text: str, calls: Sequence[ToolCall], structure: Structure | None, scored: Scored
) -> dict[str, tuple[CallVerdict, ...] | tuple[FieldVerdict, ...]]:
    """A verdict's fields about the calls of an answer and, where it owes a structure, its values."""
    fields = () if structure is None else scored_fields(text, calls, structure, scored)
    return {"calls": scored_calls(text, calls, scored), "fields": fields}


def scored_calls(text: str, calls: Sequence[ToolCall], scored: Scored) -> tuple[CallVerdict, ...]:
    """The calls of an answer with their scores; None for a call that its text does not spell as JSON.

    Where a text spells a call more than once, the call has the greatest score: its reader may have taken any of them.
    """
    places = [_places_of(text, call) for call in calls]
    spans = sorted({span for own in places for span in own})
    values = dict(zip(spans, scored(spans), strict=True))
    found = list[CallVerdict]()
    for call, own in zip(calls, places, strict=True):
        spelled = [CallVerdict(digest=call.digest, uncertainty=values[span]) for span in own]
        found.append(max(spelled, key=doubt_of, default=CallVerdict(digest=call.digest)))
    return tuple(found)


def scored_fields(
    text: str, calls: Sequence[ToolCall], structure: Structure, scored: Scored
) -> tuple[FieldVerdict, ...]:
    """The values of a structured answer with their scores; of a call, those of its arguments.

    A name that the schema does not have is a part of the value behind it. None where the answer is no whole JSON, or is
    several calls.
    """
    if not calls:
        found, schema = _fields(text, json_start(text)), structure.text
    elif len(calls) == 1 and len(places := _places_of(text, calls[0])) == 1:
        found, schema = _argument_fields(text, places[0], calls[0]), structure.arguments.get(calls[0].name)
    else:
        return ()
    named = [has_names(schema, one.path) for one in found]
    spans = [(one.start if own else one.names, one.end) for one, own in zip(found, named, strict=True)]
    return tuple(
        FieldVerdict(path=one.path, uncertainty=value, nullable=own and allows_null(schema, one.path))
        for one, own, value in zip(found, named, scored(spans), strict=True)
    )


_LETTER = re.compile(r"[^\W\d_]")
_REACT = re.compile(r"Action: *([^\n() ]+)[^\n]*\n+Action Input:[^\n{]*(?=\{)")


def calls_in_text(text: str) -> tuple[ToolCall, ...]:
    """The call that a text spells in the words of a ReAct agent: "Action: name" and "Action Input: {...}"."""
    if (found := _REACT.search(text)) is None:
        return ()
    try:
        arguments, _ = json.JSONDecoder().raw_decode(text, found.end())
    except ValueError:
        return ()
    return (ToolCall(found[1], arguments),)


def _fields(text: str, at: int) -> list[Field]:
    try:
        return fields_of(text, at)
    except ValueError:
        return []


_MARKS = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\b(?:arguments|parameters|args|json|Action Input)\b")
"""What may be between the name of a call and its arguments, besides punctuation and numbers."""


def _places_of(text: str, call: ToolCall) -> list[Span]:
    """The places where a text spells a call: its JSON, with the name right before it where that is outside."""
    decoder, own, found, begin = json.JSONDecoder(), dict(call.arguments), list[Span](), text.find("{")
    while begin >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except ValueError:
            value, end = None, begin + 1
        if isinstance(value, dict) and _calls(cast("dict[str, Any]", value), call.name, own):
            found.append((begin, end))
        elif value == own and (name := _name_before(text, begin, call.name)) is not None:
            found.append((name, end))
        else:
            end = begin + 1
        begin = text.find("{", end)
    return found


def _name_before(text: str, at: int, name: str) -> int | None:
    """Where a name begins, right before a place of a text; None where it is not there."""
    begin = text.rfind(name, 0, at)
    return None if begin < 0 or _LETTER.search(_MARKS.sub("", text[begin + len(name) : at])) else begin


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
    places = [next((at for at, key in enumerate(one.path) if key in _ARGUMENTS), None) for one in found]
    return [replace(one, path=one.path[at + 1 :]) for one, at in zip(found, places, strict=True) if at is not None]


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


def has_names(schema: Schema | None, path: Path) -> bool:
    """Whether a schema has all names of a path, so that none is the model's own."""
    for place, key in enumerate(path):
        holders = _schemas_at(schema, path[:place], schema)
        if isinstance(key, str) and not any(key in holder.get("properties", {}) for holder in holders):
            return False
    return True


def _schemas_at(schema: Any, path: Path, root: Any) -> Iterator[Schema]:
    """Every object schema that may hold at a path."""
    if not isinstance(schema, Mapping):
        return
    known = cast("Mapping[str, Any]", schema)
    further = [one for choice in ("anyOf", "oneOf", "allOf") for one in known.get(choice, ())]
    if isinstance(known.get("$ref"), str):
        further.append(_referred(known["$ref"], root))
    for one in further:
        yield from _schemas_at(one, path, root)
    if path:
        yield from _schemas_at(_member(known, path[0]), path[1:], root)
    else:
        yield known


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


def calibrate_fields(
    graded: Iterable[tuple[RecordedDraft, Any]], *, alpha: float, delta: float, tries: int = 0
) -> Calibration:
    """A calibration about the values of structured answers, from drafts and the objects that would have been right.

    "Take an answer of which some value is delivered, and one of its delivered values at random: it is wrong with
    probability at most alpha." Answers are the independent units. A value is right where the right object has an equal
    one at its path.

        with recording() as recorder:
            found = [extract.invoke(text) for text in texts]
        calibration = calibrate_fields(zip(recorder.drafts, right_objects), alpha=0.1, delta=0.1)

    A guard with this calibration withholds single values: null takes their place, and where the schema does not
    allow that, the whole answer is withheld.

    Args:
        graded: pairs of (recorded draft, right object); the object as JSON types, or of a pydantic model.
        alpha: the largest error rate of that drawn value, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        tries: numbers the calibrations on these labels, this one included; 0: this is the only one.

    Raises:
        InputError: there is something else than such pairs.
        CalibrationError: no draft has values, or they were scored in different ways.
    """
    runs, scores, correct = list[int](), list[float | None](), list[bool]()
    forms, bindings = list[PromptForm | None](), list[Binding]()
    for number, (draft, right) in enumerate(pairs_in(graded, "graded", "(recorded draft, right object)")):
        owed = _right_object(draft, right)
        verdict = draft.verdict
        if not verdict.fields:
            continue
        found = dict(verdict.tool_calls[0].arguments) if verdict.tool_calls else json_in(verdict.text)[0]
        for one in verdict.fields:
            runs.append(number)
            scores.append(one.uncertainty)
            correct.append(_at(found, one.path) == _at(owed, one.path))
        forms.append(draft.prompt)
        bindings.append(binding_of(verdict.revised(settings=FIELDS.among(verdict.details.settings))))
    if not bindings:
        raise CalibrationError("No draft has values with scores: record structured answers (with_structured_output).")
    how: dict[str, Any] = {"alpha": alpha, "delta": delta, "tries": tries, "prompts": forms}
    return calibrate_runs(runs, scores, correct, binding=shared_by(bindings, of="answers"), **how)


def _right_object(draft: object, right: object) -> Any:
    """The right object of a draft, as JSON types."""
    owed = right.model_dump(mode="json", by_alias=True) if isinstance(right, BaseModel) else right
    if not isinstance(draft, RecordedDraft) or not isinstance(owed, Mapping | list):
        raise InputError(
            "graded holds pairs of (recorded draft, right object), the object as a dict, a list or a pydantic model; "
            f"not {draft!r:.60} and {right!r:.60}"
        )
    return cast("Any", owed)


_NOTHING = object()


def _at(value: Any, path: Path) -> Any:
    """The value at a path; one that equals no other where there is none."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return (type(value) is bool, value)  # 1 is not True


# Decisions by a rule.


def judged(rule: Calibration, uncertainty: float | None, *, text: str, log: DecisionSink | None) -> bool:
    """Whether a rule for decisions or calls lets one through; a row of the log, where there is one.

    `text` is what was decided about. The log watches the promise of a rule whose labels were independent.
    """
    passes = rule.lets_through(uncertainty)
    if log is not None:
        verdict = Verdict.of(
            status="unscored" if uncertainty is None else "scored",
            action="answer" if passes else "abstain",
            text=text if passes else "",
            estimator="" if rule.binding is None else rule.binding.estimator,
            uncertainty=uncertainty,
            confidence=rule.confidence(uncertainty),
            threshold=rule.threshold,
            calibration_id=rule.id,
            alpha=rule.alpha,
            requested_alpha=rule.requested,
            promised=passes,
            model="" if rule.binding is None else rule.binding.model,
        )
        log.write(verdict, facts=Facts(alpha=rule.alpha, delta=rule.delta) if rule.is_about_answers else None)
    return passes
