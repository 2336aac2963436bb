"""Which column of a data file is which: by the names that well-known data sets and tools give them.

A name is read only where it has one meaning: `answer` is a reference in SQuAD's kin, and the model's own answer in a
table that holds `ground_truth` too. What may mean two things is refused in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from semgrad_guard.errors import DataFileError
from semgrad_guard.questions.cells import (
    DATE,
    KNOWN,
    NO_ANSWER,
    OBJECT,
    PLACEHOLDERS,
    TRUTH,
    WRITTEN,
    WRITTEN_PASSAGE,
    lines_of,
    literal,
    result_of,
    several,
)
from semgrad_guard.questions.choices import COLUMNS, MARKS, Choices, UnclearError, choices_of
from semgrad_guard.questions.layouts import QUESTION, Record, flat, plain, span_answers

C = TypeVar("C")
Need = Literal["answers", "response", "question"]
"""The content that a line must have: references (to calibrate), a response (to score), or just a question."""

_NAMES: Mapping[str, list[str]] = KNOWN["columns"]
REFERENCES, REFERENCES_BESIDE_ANSWERS = _NAMES["references"], _NAMES["references_beside_answers"]
CONTEXT: list[list[str]] = [group["names"] for group in KNOWN["passages"]]
_BEST, _ALIASES, RESPONSE, KIND, _OTHERS = (_NAMES[name] for name in ("best", "aliases", "response", "kind", "others"))
_UNANSWERABLE = dict.fromkeys(_NAMES["answerable"], False) | dict.fromkeys(_NAMES["unanswerable"], True)
_GRADE, _LOGGED = (re.compile("|".join(KNOWN["grades"][name])) for name in ("names", "logged"))
_GRADE_WORDS = frozenset(KNOWN["grades"]["words"].split())
_ANSWERS = (*REFERENCES, *REFERENCES_BESIDE_ANSWERS, *_BEST, *_ALIASES)
NO_PASSAGE = (*QUESTION, *_ANSWERS, *RESPONSE, *KIND, *_OTHERS, *COLUMNS)
"""Columns that mean something else than a passage to answer from; the answers among them would give the answer away."""


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


def fields_of(record: Record, given: Columns, place: str, *, needs: Need, cells: bool = False) -> Fields:
    """Read a record. With `cells` all values are texts, as in CSV, where several answers may be written one a line.

    References are not read where a response is needed.

    Raises:
        DataFileError: a named column is not there, two columns contradict each other, or a value is malformed, or may
            mean two things.
    """
    try:
        record = flat(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataFileError(f"{place} is laid out like LangSmith's or Natural Questions' data, and is not.") from error
    return _Reading(record, given, place, cells).fields(needs)


class _Reading:
    """One record on its way to fields."""

    def __init__(self, record: Record, given: Columns, place: str, cells: bool) -> None:
        self._record, self._given, self._cells = record, given, cells
        self._names: dict[str, list[str]] = {}
        for name in record:
            self._names.setdefault(plain(name), []).append(name)
        self._found, self._used = Fields(place), set[str]()

    def fields(self, needs: Need) -> Fields:
        """Every field that there is."""
        found = self._found
        alpaca = self._present(["instruction"])  # there, `input` is a text that the question is about
        known = QUESTION if not alpaca else [name for name in QUESTION if name != "input"]
        if name := self._column(self._given.question, known, "--column question=NAME"):
            self._take("question", name, self._asked(name))
        self._read_answers(needs)
        self._read_passage()
        for target, names in (("kind", KIND), *((column, (column,)) for column in _OTHERS)):
            if name := self._column(None, names):
                self._take(target, name, self._texts(self._record[name]) if target == "paraphrases" else ...)
        found.unread += tuple(name for name in self._record if name.strip() and name not in self._used)
        return found

    def _take(self, target: str, name: str, value: Any = ...) -> None:
        self._found.columns[target] = name
        self._found.values[target] = self._record[name] if value is ... else value
        self._used.add(name)

    def _present(self, known: Iterable[str]) -> list[str]:
        """The record's own names of these columns, in their order."""
        return [name for one in dict.fromkeys(map(plain, known)) for name in self._names.get(one, ())]

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
        if any(self._texts(self._record[name]) != self._texts(self._record[filled[0]]) for name in filled[1:]):
            named = " and ".join(json.dumps(name, ensure_ascii=False) for name in filled)
            way_out = "" if option is None else f", or name it ({option})"
            raise self._fault(f"has {named}, which are one field; keep one{way_out}")
        return next(iter(filled or there), None)

    def _asked(self, name: str) -> Any:
        """A question: a text, or the one message of a user (OpenAI's evals), whose system message is not read."""
        value = literal(self._record[name])
        if isinstance(value, list) and all(isinstance(turn, dict) for turn in cast("list[Any]", value)):
            turns = cast("list[Record]", value)
            texts = [turn.get("content") for turn in turns if turn.get("role") == "user"]
            if len(texts) != 1 or any(turn.get("role") not in ("user", "system", "developer") for turn in turns):
                raise self._fault(f'has a conversation in "{name}": give one question')
            self._found.unread += (f"{name} (system)",) if len(turns) > 1 else ()
            return texts[0]
        if isinstance(text := self._record[name], str) and WRITTEN_PASSAGE.fullmatch(text.strip()):
            raise self._fault(f'has a list or an object in "{name}", {text.strip()[:60]!r}: write the question\'s text')
        if self._given.question is None and (more := self._present(_NAMES["continued"])):
            raise self._fault(f'has "{more[0]}" next to "{name}", which may be one question: join them')
        return self._record[name]

    def _read_answers(self, needs: Need) -> None:
        """References, and the answer that a model gave, if the record tells which is which."""
        answer = self._column(None, ("answer",))
        if self._given.answers is not None:
            name = self._column(self._given.answers, ())
        else:
            beside = self._present(REFERENCES_BESIDE_ANSWERS)
            first = [column for column in REFERENCES if column != "answer" or not beside]
            name = self._column(None, (*first, *REFERENCES_BESIDE_ANSWERS), "--column answers=NAME")
            name = name or self._column(None, _BEST)
        response = self._column(None, RESPONSE) or (answer if name not in (None, answer) else None)
        if response is not None:
            self._found.columns["response"] = response
            self._found.values["response"] = self._record[response]
        if needs == "response":
            return
        flag = self._unanswerable()
        choices = self._clear(lambda: choices_of(self._record, self._names))
        if choices is not None and name is None:
            name = next(iter(self._present(MARKS)), None)
        if flag is not None:
            self._take("answers", name or flag, [])
            self._used.update(self._present(_ALIASES))
        elif name is not None and (_is_filled(self._record[name]) or self._record[name] == []):
            self._take("answers", name, self._references(name, choices))

    def _unanswerable(self) -> str | None:
        """The flag by which no answer is right."""
        for known, no_answer in _UNANSWERABLE.items():
            for name in self._present([known]):
                self._used.add(name)
                value = self._record[name]
                truth = TRUTH.get(str(value).strip().lower())
                if truth is None and _is_filled(value):
                    raise self._fault(f'has {str(value)!r:.60} in "{name}", where true or false is expected')
                if truth is no_answer:
                    return name
        return None

    def _references(self, name: str, choices: Choices | None) -> Any:
        """The texts of a column, any of which is right."""
        value = self._record[name]
        if choices is not None:
            held = literal(value)
            marks = cast("list[Any]", held) if isinstance(held, list) else [value]
            if len(marks) == 1 and (text := self._clear(lambda: choices.meant(marks[0], name))) is not None:
                self._used.update(choices.columns)
                return [text]
            if len(marks) > 1 and any(re.fullmatch(r"[A-J]|\d", str(mark)) for mark in marks):
                raise self._fault(f'has several choices in "{name}": give the texts of the right ones')
        self._require_references(name, value)
        if (yes := self._yes_or_no(value, name)) is not None:
            return [yes]
        if plain(name) == "correctanswers" and isinstance(value, str) and self._present(_BEST):
            self._used.update(self._present(_BEST))
            return [part.strip() for part in value.split(";") if part.strip()]  # TruthfulQA's own file
        found = self._answers(name)
        if not isinstance(found, list):
            return found
        texts = cast("list[Any]", found)
        for alias in self._present(_ALIASES):
            self._used.add(alias)
            texts = [*texts, *self._answers(alias)]
        return [] if len(texts) == 1 and str(texts[0]).strip().lower() in NO_ANSWER else texts

    def _answers(self, name: str) -> Any:
        """The texts of a column, each of which is one answer for sure."""
        value = self._record[name]
        if isinstance(value, str):
            value = result_of(value)
        held = literal(value)
        found = self._texts(value)
        if isinstance(held, Mapping) and "spans" in held and (found := span_answers(cast("Record", held))) is None:
            raise self._fault(f'has several spans in "{name}", which may all be needed: write one text')
        if not isinstance(found, list):
            return found
        texts = cast("list[Any]", found)
        if isinstance(held, str) or not isinstance(held, list):
            for text in texts:
                self._require_answer(str(text), name)
        if isinstance(held, str | int) or (isinstance(held, list) and len(texts) == 1):
            for text in texts:
                self._require_one(text, name, is_listed=isinstance(held, list))
        return [text for text in texts if text != ""]

    def _yes_or_no(self, value: Any, name: str) -> str | None:
        """The answer to one of BoolQ's or StrategyQA's questions; None where the value is no truth value."""
        text = str(value).strip().lower()
        if text not in ("true", "false") or not isinstance(value, str | bool):
            return None
        if "true" in str(self._found.values.get("question")).lower():
            return text
        if not self._present(("passage", "facts")):
            raise self._fault(
                f'has {json.dumps(value)} in "{name}", as programs write a yes or no: write the words of an answer, or '
                f'{{"text": "{value}"}} if it is meant'
            )
        return "yes" if text == "true" else "no"

    def _require_references(self, name: str, value: Any) -> None:
        """Refuse a log of a model's answers, grades in their place, and choices of which another column tells the
        right one.
        """
        if _is_grade(name, value) and plain(name) not in map(plain, _ANSWERS):
            raise self._fault(f'has a grade in "{name}", {value!r}, and no reference')
        if self._given.answers is not None or self._present(RESPONSE) or plain(name) not in ("answer", "answers"):
            return
        held, marks = literal(value), self._present(MARKS)
        if isinstance(held, list) and len(cast("list[Any]", held)) > 1 and marks:
            raise self._fault(f'has "{marks[0]}" next to "{name}", so that these may be choices: give the right one')
        others = {other: held for other, held in self._record.items() if plain(other) not in map(plain, NO_PASSAGE)}
        grades = [other for other, held in others.items() if _is_grade(other, held)]
        logged = [other for other, held in others.items() if _LOGGED.search(plain(other)) and _is_filled(held)]
        if sign := next(iter((*grades, *(logged if plain(name) == "answer" else ()))), None):
            raise self._fault(
                f'has "{sign}" next to "{name}", so that this may be a model\'s answer'
                f"{' and its grade' if grades else ''}: name the column of the references (--column answers={name}, if "
                "they are there)"
            )

    def _require_answer(self, text: str, name: str) -> None:
        """Refuse a text that means a missing answer, unless it is written as a list."""
        quoted = json.dumps(text, ensure_ascii=False)
        if text.strip().lower() in PLACEHOLDERS and text.strip() != "Na":
            raise self._fault(
                f'has {quoted} in "{name}", as programs write where an answer is missing: give the right answer, [] if '
                f"abstaining is right, or [{quoted}] if it is meant"
            )

    def _require_one(self, text: Any, name: str, *, is_listed: bool) -> None:
        """Refuse a text that a program has written, or that may be several answers."""
        if not isinstance(text, str | int):
            return
        text = str(text)
        quoted = json.dumps(text, ensure_ascii=False)
        meant = json.dumps({"text": text}, ensure_ascii=False)
        if WRITTEN.fullmatch(text.strip()):
            raise self._fault(
                f'has a list in "{name}" that cannot be read, {quoted:.200}: write it as JSON, ["...", "..."], or '
                f"{meant:.200} if it is one answer"
            )
        if DATE.fullmatch(text.strip()):
            raise self._fault(
                f'has {quoted} in "{name}", as programs write a date: write the words of an answer, or {meant} if it '
                "is meant"
            )
        if (parts := several(text, listed=is_listed)) is not None:
            raise self._fault(
                f'has {quoted:.200} in "{name}", which looks like several answers: write them as a list, '
                f"{json.dumps(parts, ensure_ascii=False):.200}, or {meant:.200} if it is one"
            )

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
            if (is_written or text.strip() in ("()", "{}")) and value != []:
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
        if found and all(map(_NO_PROSE.fullmatch, found.split("\n\n"))):
            raise self._fault(f'has names or numbers of passages in "{name}", {found[:60]!r}: give their texts')
        self._take("context", name, found or value)

    def _texts(self, value: Any) -> Any:
        """One text as a list of one, and the forms that well-known data give to several."""
        if value is None:
            return []
        if isinstance(value, str):
            found = literal(value)
            if not isinstance(found, str):
                return _unwrapped(found)
            return lines_of(value) if self._cells else [value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [value]
        return _unwrapped(value)

    def _clear(self, read: Callable[[], C]) -> C:
        """What `read` finds among the choices."""
        try:
            return read()
        except UnclearError as error:
            raise self._fault(str(error)) from error

    def _fault(self, fault: str) -> DataFileError:
        return DataFileError(f"{self._found.place} {fault}.")


_NO_PROSE = re.compile(r"(?=.*[\d_/])[\w./:#-]{3,}", re.ASCII)
"""An id, a name of a file, or an address."""


def _is_grade(name: str, value: Any) -> bool:
    """A truth value, a share, or a grader's word, in a column that is named like a grade."""
    text = str(value).strip().lower()
    is_one = text in TRUTH or text in _GRADE_WORDS or bool(re.fullmatch(r"[01]?\.\d+", text))
    return is_one and bool(_GRADE.search(plain(name)))


def tells_even_if_empty(name: str) -> bool:
    """Whether a column changes the meaning of others where its cell is empty: `answer` is then a model's own."""
    return plain(name) in {"question", *map(plain, REFERENCES_BESIDE_ANSWERS)}


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
        name = next((key for key in KNOWN["layouts"]["holding"] if key in held), None)
        yield from _passages(held[name]) if name is not None else (None,)
    elif isinstance(value, list):
        for passage in cast("list[Any]", value):
            if isinstance(passage, list) and len(cast("list[Any]", passage)) == 2 and isinstance(passage[1], list):
                title, sentences = cast("tuple[Any, list[Any]]", passage)
                yield f"{title}\n{''.join(map(str, sentences))}"
            elif isinstance(passage, str) and OBJECT.fullmatch(passage.strip()):
                yield None
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
        return _joined(_right(given)) if any(isinstance(item, Mapping) for item in given) else given
    return value


def _right(answers: list[Any]) -> list[Any]:
    """Those that are marked as right, where each is marked."""
    flags = ("correct", "is_correct", "isCorrect")
    objects = [cast("Record", one) for one in answers if isinstance(one, Mapping)]
    marks = [next((TRUTH.get(str(one[flag]).lower()) for flag in flags if flag in one), None) for one in objects]
    known = len(marks) == len(answers) and None not in marks
    return [one for one, right in zip(answers, marks, strict=True) if right] if known else answers


def _joined(values: Iterable[Any]) -> list[Any]:
    """All texts in these values, in order, once."""
    unwrapped = [_unwrapped(value) for value in values]
    lists = [cast("list[Any]", value) if isinstance(value, list) else [value] for value in unwrapped]
    texts = [text for group in lists for text in group]
    return [text for number, text in enumerate(texts) if text not in texts[:number]]
