"""Which column of a data file is which: by the names that well-known data sets and tools give them.

A name is read only where it has one meaning: `answer` is a reference in SQuAD's kin, and the model's own answer in a
table that holds `ground_truth` too. What may mean two things is refused in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from semgrad_guard.questions.layouts import (
    COLUMNS,
    KNOWN,
    MARKS,
    TRUTH,
    Choices,
    FaultError,
    Record,
    choices_of,
    flat,
    is_a,
    lines_of,
    literal,
    plain,
    require_no_choice,
    require_plain,
    result_of,
    shown,
    span_answers,
)

Need = Literal["answers", "response", "question"]
"""The content that a line must have: references (to calibrate), a response (to score), or just a question."""

_NAMES: Mapping[str, list[str]] = KNOWN["columns"]
_REFERENCES_BESIDE_ANSWERS, _CONTEXT = _NAMES["references_beside_answers"], KNOWN["passages"]["names"]
_UNANSWERABLE = dict.fromkeys(_NAMES["answerable"], False) | dict.fromkeys(_NAMES["unanswerable"], True)
_GRADE, _LOGGED, _RIVAL = (re.compile("|".join(KNOWN["grades"][name])) for name in ("names", "logged", "rivals"))
_GRADE_WORD, _SURE_GRADE = (re.compile(KNOWN["grades"][name]) for name in ("words", "in_any_column"))
_POINTING = re.compile(KNOWN["choices"]["pointing"])
_NO_PROSE = re.compile(r"(?=.*[\d_/])[\w./:#-]{3,}", re.ASCII)
"""An id, a name of a file, or an address."""
_ANSWERS = (*_NAMES["references"], *_REFERENCES_BESIDE_ANSWERS, *_NAMES["best"], *_NAMES["aliases"])
NO_PASSAGE = (
    *(*_NAMES["question"], *_ANSWERS, *_NAMES["response"], *_NAMES["kind"]),
    *("paraphrases", "id", *COLUMNS),
)
"""Columns that mean something else than a passage to answer from; the answers among them would give the answer away."""
_FIELDS = {*map(plain, NO_PASSAGE)} - {*map(plain, _NAMES["response"])}
_PASSAGES = {plain(name) for group in _CONTEXT for name in group}
_SURE_REFERENCES = {*map(plain, (*_NAMES["references"], *_NAMES["aliases"]))}


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
        known = [name for name in _NAMES["question"] if not (alpaca and name == "input")]
        if name := self._column("question", known):
            self._take("question", name, self._question(name))
        self._read_answers(needs)
        self._read_passage()
        for target, names in (("kind", _NAMES["kind"]), ("paraphrases", ["paraphrases"]), ("id", ["id"])):
            if name := self._column(target, names):
                value = self._record[name]
                self._take(target, name, self._texts(value) if target == "paraphrases" else value)
        found.unread += tuple(name for name in self._record if name.strip() and name not in self._used)
        return found

    def _take(self, target: str, name: str, value: Any) -> None:
        self._found.columns[target] = name
        self._found.values[target] = value
        self._used.add(name)

    def _present(self, known: Iterable[str]) -> list[str]:
        """The record's own names of these columns, in their order."""
        return [name for one in dict.fromkeys(map(plain, known)) for name in self._names.get(one, ())]

    def _is_filled(self, name: str) -> bool:
        value = self._record[name]
        return value is not None and value != [] and not (isinstance(value, str) and not value.strip())

    def _column(self, target: str, known: Iterable[str]) -> str | None:
        """The column of a field: the one that the user named, or the known ones, which must agree where several are
        there.
        """
        if (given := self._given.get(target)) is not None:
            if given not in self._record and not self._present([given]):
                raise FaultError("no_column", name=given, columns=listed(self._record))
            return given if given in self._record else self._present([given])[0]
        there = self._present(known)
        filled = [name for name in there if self._is_filled(name) or self._record[name] == []]
        if any(self._texts(self._record[name]) != self._texts(self._record[filled[0]]) for name in filled[1:]):
            way_out = f", or name it (--column {target}=NAME)" if target in ("question", "answers", "context") else ""
            raise FaultError("one_field", names=" and ".join(map(shown, filled)), way_out=way_out)
        return next(iter(filled or there), None)

    def _question(self, name: str) -> Any:
        """A question: a text, or the one message of a user (OpenAI's evals), whose system message is not read."""
        value = self._record[name]
        turns: Any = literal(value)
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in cast("list[Any]", turns)):
            roles = [turn.get("role") for turn in cast("list[Record]", turns)]
            if roles.count("user") != 1 or not {*roles} <= {"user", "system", "developer"}:
                raise FaultError("conversation", name=name)
            self._found.unread += (f"{name} (system)",) if len(roles) > 1 else ()
            return cast("list[Record]", turns)[roles.index("user")].get("content")
        if isinstance(value, str) and is_a(value, "container", "object"):
            raise FaultError("written_question", name=name, value=value)
        if isinstance(value, str) and value.strip() and is_a(value, "missing"):
            raise FaultError("missing_question", name=name, value=value.strip())
        if "question" not in self._given and (more := self._present(_NAMES["continued"])):
            raise FaultError("continued", name=name, other=more[0])
        return value

    def _read_answers(self, needs: Need) -> None:
        """References, and the answer that a model gave, if the record tells which is which."""
        beside = _REFERENCES_BESIDE_ANSWERS
        first = [name for name in _NAMES["references"] if name != "answer" or not self._present(beside)]
        name = self._column("answers", (*first, *beside)) or self._column("best", _NAMES["best"])
        answer = self._column("answer", ["answer"])
        outputs = [
            known
            for known in self._present(_NAMES["response"])
            if plain(known) != "result" or not _is_grade(known, self._record[known])
        ]
        response = self._column("response", outputs) or (answer if name not in (None, answer) else None)
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
            self._used.update(self._present(_NAMES["aliases"]))
        elif name is not None and (self._is_filled(name) or self._record[name] == []):
            self._take("answers", name, self._references(name, choices))

    def _unanswerable(self) -> str | None:
        """The flag by which no answer is right."""
        flags = [(name, no_answer) for known, no_answer in _UNANSWERABLE.items() for name in self._present([known])]
        for name, no_answer in flags:
            self._used.add(name)
            truth = TRUTH.get(str(self._record[name]).strip().lower())
            if truth is None and self._is_filled(name):
                raise FaultError("flag", name=name, value=self._record[name])
            if truth is no_answer:
                return name
        return None

    def _references(self, name: str, choices: Choices | None) -> Any:
        """The texts of a column, any of which is right."""
        value = self._record[name]
        held = literal(value)
        marks = cast("list[Any]", held) if isinstance(held, list) else [value]
        if choices is not None:
            if len(marks) == 1 and (text := choices.meant(marks[0], name)) is not None:
                self._used.update(choices.columns)
                for other in set(self._present(MARKS)) - {name}:
                    if choices.also_meant(self._record[other], other) not in (None, text):
                        raise FaultError("two_choices", name=name, text=text, other=other)
                return [text]
            if len(marks) > 1 and any(re.fullmatch(r"[A-J]|\d", str(mark)) for mark in marks):
                raise FaultError("several_choices", name=name, text=value)
        elif len(marks) == 1 and isinstance(marks[0], str | int):
            beside = {other: held for other, held in self._record.items() if plain(other) not in _FIELDS | _PASSAGES}
            require_no_choice(str(marks[0]), name, str(self._found.values.get("question")), beside)
        self._require_references(name, value)
        if (yes := self._yes_or_no(value, name)) is not None:
            return [yes]
        if plain(name) == "correctanswers" and isinstance(value, str) and self._present(_NAMES["best"]):
            self._used.update(self._present(_NAMES["best"]))
            return [part.strip() for part in value.split(";") if part.strip()]  # TruthfulQA's own file
        found = self._answers(name)
        if not isinstance(found, list):
            return found
        aliases = self._present(_NAMES["aliases"])
        self._used.update(aliases)
        texts = [*cast("list[Any]", found), *(text for alias in aliases for text in self._answers(alias))]
        return [] if len(texts) == 1 and str(texts[0]).strip().lower() in KNOWN["cells"]["no_answer"] else texts

    def _answers(self, name: str) -> Any:
        """The texts of a column, each of which is one answer for sure."""
        value = self._record[name]
        value = result_of(value) if isinstance(value, str) else value
        held, found = literal(value), self._texts(value)
        if isinstance(held, Mapping) and "spans" in held and (found := span_answers(cast("Record", held))) is None:
            raise FaultError("spans", name=name)
        if not isinstance(found, list):
            return found
        texts = cast("list[Any]", found)
        where = "object" if isinstance(held, Mapping) else "text"
        if isinstance(held, list):
            where = "list" if len(texts) == 1 else "several"
            if held and not texts:
                raise FaultError("all_wrong", name=name)
        for text in texts:
            if isinstance(text, str | int | float):
                require_plain(str(text), name, where)
        if texts and not any(str(text).strip() for text in texts):
            raise FaultError("empty", name=name)
        return [text for text in texts if text != ""]

    def _yes_or_no(self, value: Any, name: str) -> str | None:
        """The answer to one of BoolQ's or StrategyQA's questions; None where the value is no truth value."""
        text = str(value).strip().lower()
        if text not in ("true", "false") or not isinstance(value, str | bool):
            return None
        if "true" in str(self._found.values.get("question")).lower():
            return text
        if not self._present(("passage", "facts")):
            raise FaultError("truth", name=name, text=shown(value), value=value)
        return "yes" if text == "true" else "no"

    def _require_references(self, name: str, value: Any) -> None:
        """Refuse a log of a model's answers, grades in their place, and choices of which another column tells the
        right one.
        """
        if _is_grade(name, value) and plain(name) not in map(plain, _ANSWERS):
            raise FaultError("grade", name=name, value=value)
        if "answers" in self._given or plain(name) not in ("answer", "answers"):
            return
        if rival := next(filter(lambda other: self._is_rival(other, value), self._record), None):
            raise FaultError("rival", name=name, other=rival)
        if "response" in self._found.columns:
            return
        held = literal(value)
        if isinstance(held, list) and len(cast("list[Any]", held)) > 1:
            pointing = (other for other in self._record if other != name and _POINTING.search(plain(other)))
            marks = (other for other in pointing if re.fullmatch(r"[A-Ja-j]|\d", str(self._record[other]).strip()))
            if mark := next(iter((*self._present(MARKS), *marks)), None):
                raise FaultError("may_be_choices", name=name, other=mark)
        others = {other: held for other, held in self._record.items() if plain(other) not in _FIELDS}
        grades = [other for other, held in others.items() if _is_grade(other, held)]
        logged = [other for other in others if _LOGGED.search(plain(other)) and self._is_filled(other)]
        if sign := next(iter((*grades, *(logged if plain(name) == "answer" else ()))), None):
            raise FaultError("a_models", name=name, other=sign, graded=" and its grade" if grades else "")

    def _is_rival(self, other: str, value: Any) -> bool:
        """Whether a column may hold the reference, or further ones, in the place of an `answer` that differs."""
        held = self._record[other]
        if plain(other) in _SURE_REFERENCES or not _RIVAL.search(plain(other)) or not self._is_filled(other):
            return False
        texts = self._texts(held)
        is_text = isinstance(texts, list) and all(isinstance(text, str | int) for text in cast("list[Any]", texts))
        return is_text and texts != self._texts(value) and not _is_grade(other, held)

    def _read_passage(self) -> None:
        if given := self._given.get("context"):
            name = next(iter(self._present([given])), given)
        else:
            filled = [list(filter(self._is_filled, self._present(group))) for group in _CONTEXT]
            name = next((self._column("context", names) for names in filled if names), None)
        if name is None:
            return
        value = written = self._record.get(name)
        if isinstance(written, str):
            # DeepEval joins the passages of a list in its CSV files
            joined = self._cells and "|" in written and self._present(("actual_output", "expected_output"))
            value = written.split("|") if joined else literal(written)
            is_written = is_a(written, "container", "object") if value is written else passages(value) is None
            if (is_written or written.strip() in ("()", "{}")) and value != []:
                raise FaultError("written_passage", name=name, value=written.strip())
        found = passages(value)
        if given and not found:
            raise FaultError("no_passage", name=name, columns=listed(self._record))
        if isinstance(value, str) and is_a(value, "missing"):
            raise FaultError("missing_passage", name=name, value=value.strip())
        if found and all(map(_NO_PROSE.fullmatch, found.split("\n\n"))):
            raise FaultError("ids_of_passages", name=name, value=found)
        self._take("context", name, found or value)

    def _texts(self, value: Any) -> Any:
        """One text as a list of one, and the forms that well-known data give to several."""
        if value is None:
            return []
        if isinstance(value, str) and isinstance(literal(value), str):
            return lines_of(value) if self._cells else [value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return [value]
        return _unwrapped(literal(value))


def _is_grade(name: str, value: Any) -> bool:
    """A truth value, a number, or a grader's word, in a column that is named like a grade, perhaps among others; a
    grader's word that means nothing else, whatever its column is called.
    """
    if isinstance(value, dict | list):
        among = cast("Record", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        return any(_is_grade(name, one) for one in among if not isinstance(one, list))
    text = str(value).strip().lower()
    is_one = text in TRUTH or _GRADE_WORD.fullmatch(text) or re.fullmatch(r"-?\d{0,3}(?:\.\d+)?%?", text)
    is_named = bool(_GRADE.search(plain(name))) and not name.endswith(("_id", " id", "Id"))
    return _SURE_GRADE.fullmatch(text) is not None or (text != "" and bool(is_one) and is_named)


def tells_even_if_empty(name: str) -> bool:
    """Whether a column changes the meaning of others where its cell is empty: `answer` is then a model's own."""
    return plain(name) in {"question", *map(plain, _REFERENCES_BESIDE_ANSWERS)}


def listed(record: Iterable[str]) -> str:
    """Its columns, named."""
    names = ", ".join(shown(name) for name in record if name.strip())
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
    """The texts in a value; None for each thing that is not one."""
    if isinstance(value, dict):
        held = cast("Record", value)
        if {"title", "sentences"} <= held.keys():
            yield from _passages([list(pair) for pair in zip(held["title"], held["sentences"], strict=False)])
            return
        name = next((key for key in KNOWN["layouts"]["holding"] if key in held), None)
        yield from (None,) if name is None else _passages(held[name])
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
        if len(parts) == 2 and isinstance(parts[0], str) and isinstance(parts[1], list):  # one of HotpotQA's
            yield f"{parts[0]}\n{''.join(map(str, cast('list[Any]', parts[1])))}"
            return
        for part in parts:
            yield from (None,) if isinstance(part, str) and is_a(part, "object") else _passages(part)
    else:
        yield value


def _unwrapped(value: Any) -> Any:
    """The texts inside the wrappings of SQuAD, TriviaQA and others; anything else as it is."""
    if isinstance(value, Mapping):
        held = {name.lower(): content for name, content in cast("Mapping[str, Any]", value).items()}
        known = [held[name] for name in ("value", "aliases", "text", "answer") if held.get(name) is not None]
        is_part = known == [held.get("aliases")] or "unit" in held
        return cast("Any", value) if is_part or not known else _joined(known)
    if isinstance(value, tuple | list):
        given = list(cast("Iterable[Any]", value))
        return _joined(_right(given)) if any(isinstance(item, Mapping) for item in given) else given
    return value


def _right(answers: list[Any]) -> list[Any]:
    """Those that are marked as right, where each is marked."""
    flags = ("correct", "is_correct", "isCorrect", "is_right", "right", "label")
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
