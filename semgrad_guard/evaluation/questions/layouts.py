"""Data that are not one flat record a question: how well-known sets and tools nest them, and the flat form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Record = dict[str, Any]


def records_in(document: Any) -> list[Any] | None:
    """The records of a JSON document that is one object; None where it is a record itself.

    SQuAD and TriviaQA (`data`), the hub's viewer (`rows`), pandas' columns by row.
    """
    if not isinstance(document, dict):
        return None
    held = cast("Record", document)
    names = {name.lower(): name for name in held}
    if "columns" in names and all(isinstance(row, list) for row in held.get(names.get("data", ""), [None])):
        return [dict(zip(held[names["columns"]], row, strict=False)) for row in held[names["data"]]]
    for name in ("data", "rows"):
        if isinstance(found := held.get(names.get(name, "")), list):
            return [record for each in cast("list[Any]", found) for record in _within(each)]
    columns = [cast("Record", column) for column in held.values() if isinstance(column, dict)]
    if columns and len(columns) == len(held) and all(row.isdigit() for column in columns for row in column):
        return [{name: held[name].get(row) for name in held} for row in columns[0]]
    return None


def flat(record: Record) -> Record:
    """The record with the fields of LangSmith's `inputs` and `outputs`, and of Natural Questions, as its own."""
    if "annotations" in record and ("document_text" in record or isinstance(record.get("document"), dict)):
        return _natural_questions(record)
    inputs, outputs = (_object(record.get(name)) for name in ("inputs", "outputs"))
    if inputs is None:
        return record
    expected = _object(record.get("reference_outputs"))
    rest = {name: each for name, each in record.items() if name not in ("inputs", "outputs", "reference_outputs")}
    reference = outputs if expected is None else expected
    found: Record = {**rest, **inputs}
    if reference is not None:
        found["reference_outputs"] = _only(reference)
    elif "outputs" in record:
        found["reference_outputs"] = record["outputs"]
    if expected is not None and outputs is not None:
        found["response"] = _only(outputs)
    return found


def _within(entry: Any) -> list[Any]:
    """The questions of one of SQuAD's articles; a row of the hub's viewer; else the entry itself."""
    if not isinstance(entry, dict):
        return [entry]
    held = cast("Record", entry)
    if isinstance(held.get("row"), dict):
        return [held["row"]]
    paragraphs = cast("Any", held.get("paragraphs"))
    if not isinstance(paragraphs, list) or not all("qas" in each for each in cast("list[Record]", paragraphs)):
        return [held]
    return [
        {"context": each.get("context"), **question}
        for each in cast("list[Record]", paragraphs)
        for question in cast("list[Record]", each["qas"])
    ]


def _object(value: Any) -> Record | None:
    """An object, or a text that holds one, as CSV files have it."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return cast("Record", value) if isinstance(value, dict) else None


def _only(outputs: Record) -> Any:
    """The answer among a record's outputs: the only one, or the one that is called so."""
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    return next((outputs[name] for name in ("answer", "answers", "output", "expected") if name in outputs), outputs)


def _natural_questions(record: Record) -> Record:
    """Natural Questions with `answers`: the annotators' short answers; none where all of them found nothing at all."""
    tokens = str(record.get("document_text", "")).split(" ")
    answers: dict[str, None] = {}
    long_answers: list[int] = []
    for each in _rows(record["annotations"]):
        for short in _rows(each.get("short_answers") or []):
            text = short.get("text") or " ".join(tokens[short["start_token"] : short["end_token"]])
            answers.update(dict.fromkeys([text] if isinstance(text, str) else text))
        if str(each.get("yes_no_answer")).lower() in ("yes", "no", "0", "1"):
            answers["yes" if str(each["yes_no_answer"]).lower() in ("yes", "1") else "no"] = None
        long_answers.append(cast("Record", each.get("long_answer") or {}).get("start_token", -1))
    rest = {name: value for name, value in record.items() if name != "annotations"}
    if isinstance(asked := record.get("question"), dict):
        rest["question"] = cast("Record", asked).get("text")
    return {**rest, "answers": list(answers)} if answers or max(long_answers) < 0 else rest


def _rows(value: Any) -> Sequence[Record]:
    """Records as a list of them, or as an object of columns, as the hub's files have it."""
    if not isinstance(value, Mapping):
        return cast("Sequence[Record]", value)
    held = cast("Mapping[str, Any]", value)
    if not held or not all(isinstance(column, list) for column in held.values()):
        return [dict(held)]
    return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=False)]
