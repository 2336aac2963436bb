"""Which column of a data file is which: by the names that well-known data sets and tools give them.

A name is read only where it has one meaning: `answer` is a reference in SQuAD's kin, and the model's own answer in a
table that holds `ground_truth` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from semgrad_guard.errors import DataFileError
from semgrad_guard.questions.cells import (
    OF_PROGRAMS,
    PLACEHOLDERS,
    WORKING,
    WRITTEN,
    WRITTEN_PASSAGE,
    literal,
    several,
)

QUESTION = ("question", "user_input", "query", "input", "question_text")
REFERENCES = ("answers", "answer", "correct_answers", "correct_answer")
REFERENCES_BESIDE_ANSWERS = (
    *("ground_truth", "ground_truths", "reference", "references", "reference_answer", "reference_answers"),
    *("expected_output", "expected_answer", "reference_output", "reference_outputs", "gold_answer", "gold_answers"),
    *("golden_answer", "golden_answers"),
)
"""References in tables that hold a model's answers too: next to one of these, `answer` is the model's own."""
CONTEXT = (
    ("retrieval_context", "retrieved_contexts"),
    ("context", "contexts", "passage", "passages", "paragraphs"),
    ("reference_contexts",),
)
"""The passages that were found come before those that should have been."""
RESPONSE = ("response", "actual_output")
KIND = ("kind", "category")
_OTHERS = ("paraphrases", "id")
_CHOICES = ("choices", "options")
_ALIASES = ("answer_aliases",)
_GRADES = ("label", "labels", "hallucination", "is_hallucination", "hallucinated", "correct", "is_correct")
"""Columns that tell, by 0 or 1, whether a model's answer next to them is right."""
NO_PASSAGE = (*QUESTION, *REFERENCES, *REFERENCES_BESIDE_ANSWERS, *RESPONSE, *KIND, *_OTHERS)
"""Columns that mean something else than a passage to answer from; the answers among them would give the answer away."""

_NO_ANSWER_THERE = "no answer present."
"""MS MARCO's reference where the passages do not answer the question."""


@dataclass(frozen=True)
class Columns:
    """The names that the user gives to columns; without one, those of well-known data are looked for."""

    question: str | None = None
    answers: str | None = None
    context: str | None = None


@dataclass
class Fields:
    """A record by the fields of `Question`: their values, their columns, and the columns that were not read.

    `answers` is there and empty where no answer is right but an abstention, and missing where the record has none.
    """

    place: str
    values: Record = field(default_factory=dict[str, Any])
    columns: dict[str, str] = field(default_factory=dict[str, str])
    unread: tuple[str, ...] = ()


def fields_of(record: Record, given: Columns, place: str, *, cells: bool = False) -> Fields:
    """Read a record. With `cells` all values are texts, as in CSV, where several answers may be written one a line.

    Raises:
        DataFileError: a named column is not there, two columns contradict each other, or a value is malformed.
    """
    try:
        record = flat(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataFileError(f"{place} is laid out like LangSmith's or Natural Questions' data, and is not.") from error
    return _Reading(record, given, place, cells).fields()


class _Reading:
    """One record on its way to fields."""

    def __init__(self, record: Record, given: Columns, place: str, cells: bool) -> None:
        self._record, self._given, self._cells = record, given, cells
        self._names: dict[str, list[str]] = {}
        for name in record:
            self._names.setdefault(_plain(name), []).append(name)
        self._found = Fields(place)

    def fields(self) -> Fields:
        """Every field that there is."""
        found = self._found
        alpaca = self._present(["instruction"])  # there, `input` is a text that the question is about
        known = QUESTION if not alpaca else [name for name in QUESTION if name != "input"]
        if name := self._column(self._given.question, known, "--column question=NAME"):
            self._take("question", name)
        self._read_references()
        self._read_passage()
        for target, names in (("kind", KIND), *((column, (column,)) for column in _OTHERS)):
            if name := self._column(None, names):
                self._take(target, name, self._listed(self._record[name]) if target == "paraphrases" else ...)
        taken = {found.columns[name] for name in found.columns if name != "response"}
        found.unread = tuple(name for name in self._record if name.strip() and name not in taken)
        return found

    def _take(self, target: str, name: str, value: Any = ...) -> None:
        self._found.columns[target] = name
        self._found.values[target] = self._record[name] if value is ... else value

    def _present(self, known: Iterable[str]) -> list[str]:
        """The record's own names of these columns, in their order."""
        return [name for plain in dict.fromkeys(map(_plain, known)) for name in self._names.get(plain, ())]

    def _column(self, given: str | None, known: Iterable[str], option: str | None = None) -> str | None:
        """The column of a name that the user gave, or of the known ones, which must agree where several are there.

        `option` is the user's way to choose one.
        """
        if given is not None and given in self._record:
            return given
        there = self._present(known if given is None else [given])
        if given is not None and not there:
            raise self._fault(f'has no "{given}"; {listed(self._record)}')
        filled = [name for name in there if _is_filled(self._record[name]) or self._record[name] == []]
        if any(self._listed(self._record[name]) != self._listed(self._record[filled[0]]) for name in filled[1:]):
            named = " and ".join(json.dumps(name, ensure_ascii=False) for name in filled)
            way_out = "" if option is None else f", or name it ({option})"
            raise self._fault(f"has {named}, which are one field; keep one{way_out}")
        return next(iter(filled or there), None)

    def _read_references(self) -> None:
        """References, and the answer that a model gave, if the record tells which is which."""
        answer = self._column(None, ("answer",))
        if self._given.answers is not None:
            name = self._column(self._given.answers, ())
        else:
            beside = self._present(REFERENCES_BESIDE_ANSWERS)
            first = [column for column in REFERENCES if column != "answer" or not beside]
            name = self._column(None, (*first, *REFERENCES_BESIDE_ANSWERS), "--column answers=NAME")
        if name is not None and not (self._cells and not _is_filled(self._record[name])):
            self._take("answers", name, self._references(name))
        response = self._column(None, RESPONSE) or (answer if name not in (None, answer) else None)
        if response is not None:
            self._take("response", response)

    def _references(self, name: str) -> Any:
        if self._is(False, "answerable") or self._is(True, "is_impossible", "unanswerable"):
            return []
        value = self._record[name]
        if isinstance(value, str) and (end := WORKING.search(value)):
            value = end[1]
        if _plain(name) == "answer" and self._given.answers is None and not self._present(RESPONSE):
            self._require_no_grade(name)
        if chosen := self._all_chosen(value, name):
            return chosen
        if isinstance(value, str) and _plain(name) == "correctanswers" and self._present(["best_answer"]):
            return [part.strip() for part in value.split(";") if part.strip()]  # TruthfulQA's own file
        found = self._listed(value)
        if not isinstance(found, list):
            return found
        texts = cast("list[Any]", found)
        is_text = isinstance(value, str) and isinstance(literal(value), str)
        for text in texts if is_text or isinstance(value, Mapping | float) else ():
            self._require_answer(str(text), name)
            if is_text:
                self._require_one(text, name)
        texts = texts + [text for alias in self._present(_ALIASES) for text in self._listed(self._record[alias])]
        return [] if [str(text).strip().lower() for text in texts] == [_NO_ANSWER_THERE] else texts

    def _is(self, value: bool, *names: str) -> bool:
        return any(str(self._record[name]).strip().lower() == str(value).lower() for name in self._present(names))

    def _require_answer(self, text: str, name: str) -> None:
        """Refuse a text that means a missing answer, unless it is written as a list."""
        quoted = json.dumps(text, ensure_ascii=False)
        if text.strip().lower() in PLACEHOLDERS and text.strip() != "Na":
            raise self._fault(
                f'has {quoted} in "{name}", as programs write where an answer is missing: give the right answer, [] if '
                f"abstaining is right, or [{quoted}] if it is meant"
            )

    def _require_one(self, text: str, name: str) -> None:
        """Refuse a text that a program has written, or that may be several answers."""
        quoted = json.dumps(text, ensure_ascii=False)
        if WRITTEN.fullmatch(text.strip()):
            raise self._fault(
                f'has a list in "{name}" that cannot be read, {quoted:.200}: write it as JSON, ["...", "..."], or '
                f"[{quoted:.200}] if it is one answer"
            )
        if self._cells and OF_PROGRAMS.fullmatch(text.strip()):
            raise self._fault(
                f'has {quoted} in "{name}", as programs write a yes or no, or a date: write the words of an answer, or '
                f"[{quoted}] if it is meant"
            )
        if (parts := several(text)) is not None:
            raise self._fault(
                f'has {quoted:.200} in "{name}", which looks like several answers: write them as a list, '
                f"{json.dumps(parts, ensure_ascii=False):.200}, or [{quoted:.200}] if it is one"
            )

    def _require_no_grade(self, name: str) -> None:
        """Refuse a log of a model's answers: next to the answer is a grade of it."""
        for grade in self._present(_GRADES):
            if str(self._record[grade]).strip().lower() in ("0", "1", "0.0", "1.0", "true", "false", "yes", "no"):
                raise self._fault(
                    f'has "{grade}" next to "{name}", so that this may be a model\'s answer and its grade: name the '
                    f"column of the references (--column answers={name}, if they are there)"
                )

    def _all_chosen(self, value: Any, name: str) -> list[Any]:
        """The choices that a value, or each of a list of them, names; empty where it names none."""
        held = literal(value)
        marks = cast("list[Any]", held) if isinstance(held, list) else [value]
        chosen = [self._chosen(mark, name) for mark in marks]
        found = [mark if text is None else text for mark, text in zip(marks, chosen, strict=True)]
        return found if any(text is not None for text in chosen) else []

    def _chosen(self, value: Any, name: str) -> str | None:
        """The text of the choice that a number or a letter names; None where the record has no choices, or the answer
        is a text.

        Numbers count from 0, as in MMLU's `choices`.
        """
        mark = str(value).strip()
        is_number = mark.isdecimal() and not isinstance(value, bool)
        if not is_number and not re.fullmatch("[A-Za-z]", mark):
            return None
        held, first = self._choices(letters=not is_number)
        if not held:
            return None
        meant = {text for label, text in held.items() if label == mark.upper()}
        if is_number and int(mark) < len(held) and first == "choices":
            meant.add(list(held.values())[int(mark)])
        if not isinstance(value, int):
            meant |= {text for text in held.values() if text == mark}
        if len(meant) != 1:
            raise self._fault(
                f'has {mark!r} in "{name}", and which of its {first} that is cannot be told: write the answer\'s text'
            )
        return meant.pop()

    def _choices(self, *, letters: bool) -> tuple[dict[str, str], str]:
        """The choices of a question by their labels, and the name of their column; `letters` may be columns, too."""
        columns = [letter for letter in "ABCDEFGHIJ" if letter in self._record]
        if letters and columns[:2] == ["A", "B"]:  # MMLU's own files
            return {letter: str(self._record[letter]) for letter in columns}, "columns A, B, ..."
        for name in self._present(_CHOICES):
            held: Any = literal(self._record[name])
            labels: Any = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            if isinstance(held, Mapping) and isinstance(texts := cast("Record", held).get("text"), list):
                labels, held = cast("Record", held).get("label", labels), cast("Any", texts)  # ARC
            if isinstance(held, Mapping):
                labels, held = list(cast("Record", held)), list(cast("Record", held).values())
            if not isinstance(held, list):
                raise self._fault(f'has "{name}" that cannot be read: write them as a JSON list, ["...", "..."]')
            texts = cast("list[Any]", held)
            return {str(label).upper(): str(text) for label, text in zip(labels, texts, strict=False)}, _plain(name)
        return {}, ""

    def _read_passage(self) -> None:
        given = self._given.context
        if given is None:
            filled = [[name for name in self._present(group) if _is_filled(self._record[name])] for group in CONTEXT]
            name = next((self._column(None, names, "--column context=NAME") for names in filled if names), None)
        else:
            name = next(iter(self._present([given])), given)
        if name is None:
            return
        value = self._record.get(name)
        if isinstance(text := value, str):
            # DeepEval joins the passages of a list in its CSV files
            joined = self._cells and "|" in value and self._present(("actual_output", "expected_output"))
            value = text.split("|") if joined else literal(text)
            is_written = WRITTEN_PASSAGE.fullmatch(text.strip()) if value is text else passages(value) is None
            if is_written and value != []:
                raise self._fault(
                    f'has a list or an object in "{name}" that cannot be read, {text.strip()[:60]!r}: write its texts '
                    'as JSON, ["...", "..."], or [] if there is none'
                )
        found = passages(value)
        if given is not None and not found:
            raise self._fault(f'has no text in "{name}": it must hold one, or a list of some; {listed(self._record)}')
        if isinstance(value, str) and value.strip().lower() in PLACEHOLDERS:
            raise self._fault(
                f'has {value.strip()!r} in "{name}", where a passage is expected; leave it empty if there is none'
            )
        self._take("context", name, found or value)

    def _listed(self, value: Any) -> Any:
        """One text as a list of one, and the forms that well-known data give to several."""
        if value is None:
            return []
        if isinstance(value, str):
            found = literal(value)
            if not isinstance(found, str):
                return _unwrapped(found)
            return [line.strip() for line in value.splitlines() if line.strip()] if self._cells else [value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [value]
        return _unwrapped(value)

    def _fault(self, fault: str) -> DataFileError:
        return DataFileError(f"{self._found.place} {fault}.")


def tells_even_if_empty(name: str) -> bool:
    """Whether a column changes the meaning of others where its cell is empty: `answer` is then a model's own."""
    return _plain(name) in {"question", *map(_plain, REFERENCES_BESIDE_ANSWERS)}


@lru_cache(maxsize=4096)  # every record of a file has the same names
def _plain(name: str) -> str:
    """A column's name without what spellings differ in: "Ground Truth", "ground_truth" and "groundTruth" are one."""
    return re.sub(r"[\W_]", "", name).lower()


def listed(record: Iterable[str]) -> str:
    """Its columns, named."""
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in record if name.strip())
    return f"its columns are {names}" if names else "it is empty"


def passages(value: Any) -> str | None:
    """The text to answer from, whatever holds it; None if there is none, or if it is not a text.

    A text; a list of texts or of documents; HotpotQA's titles with sentences; MS MARCO's passages.
    """
    if isinstance(value, str):
        return value if value.strip() else None
    texts = list(_passages(value))
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return "\n\n".join(texts)


def _passages(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        held = cast("Mapping[str, Any]", value)
        if {"title", "sentences"} <= held.keys():
            yield from _passages([list(pair) for pair in zip(held["title"], held["sentences"], strict=False)])
            return
        known = ("passage_text", "page_content", "paragraph_text", "text", "content")
        name = next((key for key in known if key in held), None)
        yield from _passages(held[name]) if name is not None else (None,)
    elif isinstance(value, list):
        for passage in cast("list[Any]", value):
            if isinstance(passage, list) and len(cast("list[Any]", passage)) == 2 and isinstance(passage[1], list):
                title, sentences = cast("tuple[Any, list[Any]]", passage)
                yield f"{title}\n{''.join(map(str, sentences))}"
            else:
                yield from _passages(passage)
    else:
        yield value


def _is_filled(value: Any) -> bool:
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def _unwrapped(value: Any) -> Any:
    """The texts inside the wrappings of SQuAD, TriviaQA and others; anything else as it is."""
    if isinstance(value, Mapping):
        held = {name.lower(): content for name, content in cast("Mapping[str, Any]", value).items()}
        known = [held[name] for name in ("value", "aliases", "text", "answer") if held.get(name) is not None]
        return _joined(known) if known else cast("Any", value)
    if isinstance(value, tuple | list):
        given = list(cast("Iterable[Any]", value))
        return _joined(given) if any(isinstance(item, Mapping) for item in given) else given
    return value


def _joined(values: Iterable[Any]) -> list[Any]:
    """All texts in these values, in order, once."""
    unwrapped = [_unwrapped(value) for value in values]
    lists = [cast("list[Any]", value) if isinstance(value, list) else [value] for value in unwrapped]
    texts = [text for group in lists for text in group]
    return [text for number, text in enumerate(texts) if text not in texts[:number]]


Record = dict[str, Any]


def records_in(document: Any) -> list[Any] | None:
    """The records of a JSON document that is one object; None where it is a record itself.

    SQuAD and TriviaQA (`data`), the hub's viewer (`rows`), pandas' columns by row, and columns as lists.
    """
    if not isinstance(document, dict):
        return None
    held = cast("Record", document)
    names = {name.lower(): name for name in held}
    if "columns" in names and all(isinstance(row, list) for row in held.get(names.get("data", ""), [None])):
        return [dict(zip(held[names["columns"]], row, strict=False)) for row in held[names["data"]]]
    for name in ("data", "rows"):
        if isinstance(found := held.get(names.get(name, "")), list):
            return [record for entry in cast("list[Any]", found) for record in _within(entry)]
    lists = [cast("list[Any]", column) for column in held.values() if isinstance(column, list)]
    if lists and len(lists) == len(held) and len({len(column) for column in lists}) == 1:
        return [dict(zip(held, row, strict=True)) for row in zip(*lists, strict=True)]
    columns = [cast("Record", column) for column in held.values() if isinstance(column, dict)]
    if columns and len(columns) == len(held) and all(row.isdigit() for column in columns for row in column):
        return [{name: held[name].get(row) for name in held} for row in columns[0]]
    return None


def flat(record: Record) -> Record:
    """The record with the fields of LangSmith's `inputs` and `outputs`, and of Natural Questions, as its own."""
    if "annotations" in record and ("document_text" in record or isinstance(record.get("document"), dict)):
        return _natural_questions(record)
    parts = {name: _part(record, name) for name in ("inputs", "outputs", "reference", "reference_outputs")}
    inputs, outputs, reference, expected = parts.values()
    if not isinstance(inputs, dict):
        return record
    is_part = [name for name in record if name in parts or name.partition(".")[0] in parts]
    found: Record = {name: value for name, value in record.items() if name not in is_part} | cast("Record", inputs)
    expected = reference if expected is None else expected
    if expected is None and not any(name in record for name in _OF_A_RUN):
        expected, outputs = outputs, None
    if expected is not None or "reference_outputs" in record:
        found["reference_outputs"] = _only(expected)
    if outputs is not None:
        found["response"] = _only(outputs)
    return found


_OF_A_RUN = ("run_type", "trace_id", "start_time", "execution_time", "example_id", "reference_example_id")
"""Fields of LangSmith's runs and results, whose `outputs` are a model's own; those of its examples are references."""


def _part(record: Record, name: str) -> Any:
    """A part of a record: its own field, an object or a text that holds one; or its fields, as name.field."""
    value = record.get(name)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError):
            return json.loads(value)
    fields = {key.removeprefix(f"{name}."): held for key, held in record.items() if key.startswith(f"{name}.")}
    return fields or value


def _within(entry: Any) -> list[Any]:
    """The questions of one of SQuAD's articles; a row of the hub's viewer; else the entry itself."""
    if not isinstance(entry, dict):
        return [entry]
    held = cast("Record", entry)
    if isinstance(held.get("row"), dict):
        return [held["row"]]
    paragraphs = cast("Any", held.get("paragraphs"))
    if not isinstance(paragraphs, list) or not all(
        "qas" in paragraph for paragraph in cast("list[Record]", paragraphs)
    ):
        return [held]
    return [
        {"context": paragraph.get("context"), **question}
        for paragraph in cast("list[Record]", paragraphs)
        for question in cast("list[Record]", paragraph["qas"])
    ]


def _only(outputs: Any) -> Any:
    """The answer among a record's outputs: the only one, or the only one that is called so."""
    if not isinstance(outputs, dict):
        return outputs
    held = cast("Record", outputs)
    named = [held[name] for name in ("answer", "answers", "output", "expected") if name in held]
    values = named or list(held.values())
    return values[0] if len(values) == 1 else {"several": held}  # no text, and refused as such


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
