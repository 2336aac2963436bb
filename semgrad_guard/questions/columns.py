"""Which column of a data file is which: by the names that well-known data sets and tools give them.

A name is read only where it has one meaning: `answer` is a reference in SQuAD's kin, and the model's own answer in a
table that holds `ground_truth` too. What may mean two things is refused in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from semgrad_guard.questions.cells import (
    DATE,
    KNOWN,
    NO_ANSWER,
    OBJECT,
    PLACEHOLDERS,
    TRUTH,
    WRITTEN,
    WRITTEN_PASSAGE,
    FaultError,
    lines_of,
    literal,
    result_of,
    several,
)
from semgrad_guard.questions.choices import COLUMNS, MARKS, Choices, choices_of
from semgrad_guard.questions.layouts import QUESTION, Record, flat, plain, span_answers

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


@dataclass
class Fields:
    """A record by the fields of `Question`: their values, their columns, and the columns that were not read.

    `answers` is there and empty where every claim is wrong, and missing where the record has none.
    """

    values: Record = field(default_factory=dict[str, Any])
    columns: dict[str, str] = field(default_factory=dict[str, str])
    unread: tuple[str, ...] = ()


def fields_of(record: Record, given: Mapping[str, str], *, needs: Need, cells: bool = False) -> Fields:
    """Read a record. With `cells` all values are texts, as in CSV, where several answers may be written one a line.

    `given` are the names that the user gives to the columns of question, answers and context; without one, those of
    well-known data are looked for. References are not read where a response is needed.

    Raises:
        FaultError: a named column is not there, two columns contradict each other, or a value is malformed, or may
            mean two things.
    """
    try:
        record = flat(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FaultError("layout") from error
    return _Reading(record, given, cells).fields(needs)


class _Reading:
    """One record on its way to fields."""

    def __init__(self, record: Record, given: Mapping[str, str], cells: bool) -> None:
        self._record, self._given, self._cells = record, given, cells
        self._names: dict[str, list[str]] = {}
        for name in record:
            self._names.setdefault(plain(name), []).append(name)
        self._found, self._used = Fields(), set[str]()

    def fields(self, needs: Need) -> Fields:
        """Every field that there is."""
        found = self._found
        alpaca = self._present(["instruction"])  # there, `input` is a text that the question is about
        known = QUESTION if not alpaca else [name for name in QUESTION if name != "input"]
        if name := self._column(self._given.get("question"), known, "--column question=NAME"):
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

    def _is_filled(self, name: str) -> bool:
        return _is_filled(self._record[name])

    def _column(self, given: str | None, known: Iterable[str], option: str | None = None) -> str | None:
        """The column of a name that the user gave, or of the known ones, which must agree where several are there.

        `option` is the user's way to choose one.
        """
        if given is not None and given in self._record:
            return given
        there = self._present(known if given is None else [given])
        if given is not None and not there:
            raise FaultError("no_column", name=given, columns=listed(self._record))
        filled = [name for name in there if self._is_filled(name) or self._record[name] == []]
        if any(self._texts(self._record[name]) != self._texts(self._record[filled[0]]) for name in filled[1:]):
            names = " and ".join(json.dumps(name, ensure_ascii=False) for name in filled)
            raise FaultError("one_field", names=names, way_out="" if option is None else f", or name it ({option})")
        return next(iter(filled or there), None)

    def _asked(self, name: str) -> Any:
        """A question: a text, or the one message of a user (OpenAI's evals), whose system message is not read."""
        value = literal(self._record[name])
        if isinstance(value, list) and all(isinstance(turn, dict) for turn in cast("list[Any]", value)):
            turns = cast("list[Record]", value)
            texts = [turn.get("content") for turn in turns if turn.get("role") == "user"]
            if len(texts) != 1 or any(turn.get("role") not in ("user", "system", "developer") for turn in turns):
                raise FaultError("conversation", name=name)
            self._found.unread += (f"{name} (system)",) if len(turns) > 1 else ()
            return texts[0]
        if isinstance(text := self._record[name], str) and WRITTEN_PASSAGE.fullmatch(text.strip()):
            raise FaultError("no_question", name=name, text=text.strip())
        if "question" not in self._given and (more := self._present(_NAMES["continued"])):
            raise FaultError("continued", name=name, other=more[0])
        return self._record[name]

    def _read_answers(self, needs: Need) -> None:
        """References, and the answer that a model gave, if the record tells which is which."""
        answer = self._column(None, ("answer",))
        if "answers" in self._given:
            name = self._column(self._given["answers"], ())
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
            self._used |= set() if response is None else {response}
            return
        flag, choices = self._unanswerable(), choices_of(self._record, self._names)
        if choices is not None and name is None:
            name = next(iter(self._present(MARKS)), None)
        if flag is not None:
            self._take("answers", name or flag, [])
            self._used.update(self._present(_ALIASES))
        elif name is not None and (self._is_filled(name) or self._record[name] == []):
            self._take("answers", name, self._references(name, choices))

    def _unanswerable(self) -> str | None:
        """The flag by which no answer is right."""
        flags = [(name, no_answer) for known, no_answer in _UNANSWERABLE.items() for name in self._present([known])]
        for name, no_answer in flags:
            self._used.add(name)
            truth = TRUTH.get(str(self._record[name]).strip().lower())
            if truth is None and self._is_filled(name):
                raise FaultError("flag", name=name, text=str(self._record[name]))
            if truth is no_answer:
                return name
        return None

    def _references(self, name: str, choices: Choices | None) -> Any:
        """The texts of a column, any of which is right."""
        value = self._record[name]
        if choices is not None:
            held = literal(value)
            marks = cast("list[Any]", held) if isinstance(held, list) else [value]
            if len(marks) == 1 and (text := choices.meant(marks[0], name)) is not None:
                self._used.update(choices.columns)
                return [text]
            if len(marks) > 1 and any(re.fullmatch(r"[A-J]|\d", str(mark)) for mark in marks):
                raise FaultError("choices", name=name)
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
            raise FaultError("spans", name=name)
        if not isinstance(found, list):
            return found
        texts, is_listed = cast("list[Any]", found), isinstance(held, list)
        for text in texts:
            if not is_listed:
                _require_answer(str(text), name)
            if isinstance(text, str | int) and (isinstance(held, str | int) or (is_listed and len(texts) == 1)):
                _require_one(str(text), name, is_listed=is_listed)
        return [text for text in texts if text != ""]

    def _yes_or_no(self, value: Any, name: str) -> str | None:
        """The answer to one of BoolQ's or StrategyQA's questions; None where the value is no truth value."""
        text = str(value).strip().lower()
        if text not in ("true", "false") or not isinstance(value, str | bool):
            return None
        if "true" in str(self._found.values.get("question")).lower():
            return text
        if not self._present(("passage", "facts")):
            raise FaultError("yes_or_no", name=name, quoted=json.dumps(value), text=value)
        return "yes" if text == "true" else "no"

    def _require_references(self, name: str, value: Any) -> None:
        """Refuse a log of a model's answers, grades in their place, and choices of which another column tells the
        right one.
        """
        if _is_grade(name, value) and plain(name) not in map(plain, _ANSWERS):
            raise FaultError("grade", name=name, text=value)
        if "answers" in self._given or self._present(RESPONSE) or plain(name) not in ("answer", "answers"):
            return
        held, marks = literal(value), self._present(MARKS)
        if isinstance(held, list) and len(cast("list[Any]", held)) > 1 and marks:
            raise FaultError("may_be_choices", name=name, other=marks[0])
        others = {other: held for other, held in self._record.items() if plain(other) not in map(plain, NO_PASSAGE)}
        grades = [other for other, held in others.items() if _is_grade(other, held)]
        logged = [other for other, held in others.items() if _LOGGED.search(plain(other)) and _is_filled(held)]
        if sign := next(iter((*grades, *(logged if plain(name) == "answer" else ()))), None):
            raise FaultError("models_answer", name=name, other=sign, grade=" and its grade" if grades else "")

    def _read_passage(self) -> None:
        given = self._given.get("context")
        if given is None:
            filled = [[name for name in self._present(group) if self._is_filled(name)] for group in CONTEXT]
            name = next((self._column(None, names, "--column context=NAME") for names in filled if names), None)
        else:
            name = next(iter(self._present([given])), given)
        if name is None:
            return
        value = self._record.get(name)
        if isinstance(value, str):
            value = self._written_passage(value, name)
        found = passages(value)
        if given is not None and not found:
            raise FaultError("no_passage", name=name, columns=listed(self._record))
        if isinstance(value, str) and value.strip().lower() in PLACEHOLDERS:
            raise FaultError("missing_passage", name=name, text=value.strip())
        if found and all(map(_NO_PROSE.fullmatch, found.split("\n\n"))):
            raise FaultError("names_of_passages", name=name, text=found)
        self._take("context", name, found or value)

    def _written_passage(self, text: str, name: str) -> Any:
        """A text, or the passages that are written in it."""
        # DeepEval joins the passages of a list in its CSV files
        joined = self._cells and "|" in text and self._present(("actual_output", "expected_output"))
        value = text.split("|") if joined else literal(text)
        is_written = WRITTEN_PASSAGE.fullmatch(text.strip()) if value is text else passages(value) is None
        if (is_written or text.strip() in ("()", "{}")) and value != []:
            raise FaultError("written_passage", name=name, text=text.strip())
        return value

    def _texts(self, value: Any) -> Any:
        """One text as a list of one, and the forms that well-known data give to several."""
        if value is None:
            return []
        if isinstance(value, str) and isinstance(literal(value), str):
            return lines_of(value) if self._cells else [value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [value]
        return _unwrapped(literal(value))


def _require_answer(text: str, name: str) -> None:
    """Refuse a text that means a missing answer, unless it is written as a list."""
    if text.strip().lower() in PLACEHOLDERS and text.strip() != "Na":
        raise FaultError("placeholder", name=name, quoted=json.dumps(text, ensure_ascii=False))


def _require_one(text: str, name: str, *, is_listed: bool) -> None:
    """Refuse a text that a program has written, or that may be several answers."""
    shown = {"quoted": json.dumps(text, ensure_ascii=False), "meant": json.dumps({"text": text}, ensure_ascii=False)}
    if WRITTEN.fullmatch(text.strip()):
        raise FaultError("written", name=name, **shown)
    if DATE.fullmatch(text.strip()):
        raise FaultError("date", name=name, **shown)
    if (parts := several(text, listed=is_listed)) is not None:
        raise FaultError("several", name=name, parts=json.dumps(parts, ensure_ascii=False), **shown)


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
