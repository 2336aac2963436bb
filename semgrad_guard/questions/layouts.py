"""How well-known data and tools nest their records: documents with a list of them in it, and records in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

from semgrad_guard.questions.cells import KNOWN, FaultError

Record = dict[str, Any]


@lru_cache(maxsize=4096)  # every record of a file has the same names
def plain(name: str) -> str:
    """A column's name without what spellings differ in: "Ground Truth", "ground_truth" and "groundTruth" are one."""
    return re.sub(r"[\W_]", "", name).lower()


_INPUTS, _OF_A_RUN, _ASSERTED = (KNOWN["layouts"][name] for name in ("inputs", "of_a_run", "asserted"))
_LISTS, _EXPECTED, _ANSWERS = (
    frozenset(map(plain, KNOWN["layouts"][name])) for name in ("lists", "expected", "answers")
)
_QUESTION = frozenset(map(plain, KNOWN["columns"]["question"]))
_REFERENCES = _EXPECTED | {"groundtruth", "groundtruths"}
_PARTS = _EXPECTED | {"outputs", *_INPUTS}
_AROUND = {"table", *map(plain, KNOWN["passages"]["names"][1])}
"""Fields of a document that all of its questions are about."""


def records_in(document: Record) -> list[Any]:
    """The records of a JSON document that is one object, or the object itself, if it is a record.

    SQuAD, TriviaQA and others (a list under a name), the hub's viewer (`rows`), pandas' columns by row, columns as
    lists, and objects by their ids (DROP).

    Raises:
        FaultError: it holds several lists of records.
    """
    names = {plain(name): name for name in document}
    if "columns" in names and all(isinstance(row, list) for row in document.get(names.get("data", ""), [None])):
        return [dict(zip(document[names["columns"]], row, strict=False)) for row in document[names["data"]]]
    questions = [held for name, held in flat(document).items() if plain(name) in _QUESTION]
    if any(isinstance(held, str) or (_objects(held) and "role" in held[0]) for held in questions):
        return [document]
    values = [*document.values()]
    are_lists = bool(values) and all(isinstance(column, list) for column in values)
    if are_lists and len({*map(len, values)}) == 1 and not all(map(_objects, values)):
        return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]
    if values and all(isinstance(held, dict) for held in values):
        if all(row.isdigit() for column in values for row in column):
            return [{name: document[name].get(row) for name in document} for row in values[0]]
        return [record for key, held in document.items() for record in _within({"id": key, **held})]
    lists = {name: cast("list[Any]", held) for name, held in document.items() if _objects(held)}
    named = {name: held for name, held in lists.items() if plain(name) in _LISTS} or lists
    if len(named) > 1:
        raise FaultError(f"with several lists of records in it, {', '.join(named)}: give one of them")
    around = _around(document, [*named.values()])
    return [{**around, **record} for held in named.values() for entry in held for record in _within(entry)] or [
        document
    ]


def _objects(held: Any) -> bool:
    """A list of objects, one at least."""
    return isinstance(held, list) and held != [] and all(isinstance(entry, dict) for entry in cast("list[Any]", held))


def _within(entry: Record) -> list[Record]:
    """The questions of one of SQuAD's articles or DROP's passages; a row of the hub's viewer; else the entry itself."""
    if isinstance(entry.get("row"), dict):
        return [entry["row"]]
    held = next((entry[name] for name in ("paragraphs", "qas", "qa_pairs") if _objects(entry.get(name))), None)
    if held is None or not _QUESTION.isdisjoint(map(plain, entry)):
        return [entry]
    return [{**_around(entry, [held]), **record} for part in held for record in _within(part)]


def _around(document: Record, records: list[Any]) -> Record:
    """The fields that all of a document's `records` share."""
    return {name: held for name, held in document.items() if plain(name) in _AROUND and held not in records}


def flat(record: Record) -> Record:
    """The record with the fields of its parts as its own: those of tools, and Natural Questions' annotations."""
    if "annotations" in record and ("document_text" in record or isinstance(record.get("document"), dict)):
        return _natural_questions(record)
    found = _nested(record)
    if isinstance(found.get("inputs"), dict):
        found = _langsmith(found)
    for name in _INPUTS:
        if isinstance(found.get(name), dict):
            found |= found.pop(name)
    for name in found:
        if plain(name) in _EXPECTED:
            found[name] = _only(found[name])
    if isinstance(stem := found.get("question"), dict):  # CommonsenseQA's and NarrativeQA's questions
        parts = dict(cast("Record", stem))
        text = parts.pop("stem", parts.pop("text", None))
        found = {**parts, **found, "question": text}
    return _promptfoo(found)


def _nested(record: Record) -> Record:
    """The record with its parts as objects, where tables hold them as JSON, or each field of them as name.field."""
    found: Record = {}
    for name, value in record.items():
        part, mark, field = name.replace("/", ".").partition(".")
        if mark and plain(part) in _PARTS:
            found.setdefault(part, {})[field] = value
            continue
        found[name] = value
        if plain(name) in _PARTS and isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(ValueError):
                found[name] = json.loads(value)
    return found


def _langsmith(record: Record) -> Record:
    """LangSmith's record, whose `outputs` are references in an example, and a model's own in a run or a result."""
    found = dict(record)
    outputs = found.pop("outputs", None)
    if "reference" in found:
        found["reference_outputs"] = found.pop("reference")
    has_references = not _REFERENCES.isdisjoint(map(plain, found))
    is_example = not has_references and not any(name in record for name in _OF_A_RUN)
    if outputs is None:
        return found
    return {**found, "reference_outputs": outputs} if is_example else {**found, "response": _only(outputs)}


def _only(outputs: Any) -> Any:
    """The answer among a record's outputs: the only one, or the only one that is called so."""
    if not isinstance(outputs, dict):
        return outputs
    held = cast("Record", outputs)
    if "text" in held or "value" in held or "aliases" in held:  # an answer as SQuAD and TriviaQA write it
        return held
    named = [held[name] for name in held if plain(name) in _ANSWERS and held[name] is not None]
    values = named or [value for name, value in held.items() if not re.search("fact|guideline", plain(name))]
    return values[0] if len(values) == 1 else {"several": held}  # no text, and refused as such


_PREFIX = re.compile(r"([a-z]+(?:-[a-z]+)*)\s*:\s*(\S.*)", re.DOTALL)


def _promptfoo(record: Record) -> Record:
    """With `answers`: the one thing that promptfoo asserts of the output; what is no text is refused as such."""
    asserted: Any = record.get("assert")
    columns = [name for name in record if re.fullmatch(r"__expected\d*", name)]
    if columns:
        parts = [_PREFIX.fullmatch(str(record[name])) or ("", "equals", record[name]) for name in columns]
        asserted = [{"type": part[1], "value": part[2]} for part in parts]
    if not _objects(asserted):
        return record
    found = cast("list[Record]", asserted)
    rest = {name: value for name, value in record.items() if name != "assert" and name not in columns}
    if len(found) != 1 or found[0].get("type") not in _ASSERTED:
        return rest | {"answers": {"assert": found}}
    return rest | {"answers": found[0].get("value")}


def _natural_questions(record: Record) -> Record:
    """Natural Questions with `answers`: the annotators' short answers; none where all of them found nothing at all."""
    tokens = str(record.get("document_text", "")).split(" ")
    answers: dict[str, None] = {}
    long_answers: list[int] = []
    for row in _rows(record["annotations"]):
        for short in _rows(row.get("short_answers") or []):
            text = short.get("text") or " ".join(tokens[short["start_token"] : short["end_token"]])
            answers.update(dict.fromkeys([text] if isinstance(text, str) else text))
        if str(row.get("yes_no_answer")).lower() in ("yes", "no", "0", "1"):
            answers["yes" if str(row["yes_no_answer"]).lower() in ("yes", "1") else "no"] = None
        long_answers.append(cast("Record", row.get("long_answer") or {}).get("start_token", -1))
    rest = {name: value for name, value in record.items() if name != "annotations"}
    if isinstance(question := record.get("question"), dict):
        rest["question"] = cast("Record", question).get("text")
    return {**rest, "answers": list(answers)} if answers or max(long_answers) < 0 else rest


def _rows(value: Any) -> Sequence[Record]:
    """Records as a list of them, or as an object of columns, as the hub's files have it."""
    if not isinstance(value, Mapping):
        return cast("Sequence[Record]", value)
    held = cast("Mapping[str, Any]", value)
    if not held or not all(isinstance(column, list) for column in held.values()):
        return [dict(held)]
    return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=False)]


def span_answers(held: Mapping[str, Any]) -> list[str] | None:
    """DROP's answer, a number, a date or a span; None where it has several spans, which may all be needed."""
    day = cast("Record", held.get("date") or {})
    date = " ".join(str(day[part]) for part in ("day", "month", "year") if day.get(part))
    texts = (str(held.get("number") or ""), date, *(held.get("spans") or ()))
    found = dict.fromkeys(text for text in texts if text)
    return [*found] if len(found) == 1 else None
