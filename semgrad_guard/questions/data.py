"""A user's questions: read from a file or a dataset, compared with each other, and put into a prompt.

Broken lines are named and the rest is not lost. Near-duplicates, probably wordings of one fact, are found by words and
references. A form of prompt has the name that a calibration is bound to.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from semgrad_guard.declared import first_fault
from semgrad_guard.errors import DataFileError, InputError, PromptTooLongError
from semgrad_guard.files import called
from semgrad_guard.questions.columns import NO_PASSAGE, Fields, Need, fields_of, listed
from semgrad_guard.questions.data_files import Entry, entries
from semgrad_guard.questions.layouts import KNOWN, FaultError, Record
from semgrad_guard.records import Message, PromptForm, in_context


def _numeral(value: Any) -> Any:
    """A number as text: a reference may be 42, an id 7; pandas makes 1969.0 of 1969 in a column that has gaps.

    A number of 32 bits is written as such: 0.1. NaN and infinity are none; a question is never a number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return value
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    short = f"{value:.7g}"
    return short if c_float(float(short)).value == value else str(value)


Text = Annotated[str, BeforeValidator(_numeral)]
_COMPARED: dict[Need, tuple[str, ...]] = {
    "answers": ("answers",),
    "question": ("answers", "paraphrases"),
    "response": (),
}
"""Fields in which lines with the same question must agree."""
_DUE = {
    "string_type": "text",
    "string_unicode": "text without lone surrogates",
    "tuple_type": "a text or a list of them",
}


class Question(BaseModel, frozen=True, extra="forbid"):
    """One line of a data file.

    `answers` are the references, any of which counts as correct; without one, an abstention is. `context` is a passage
    to answer from. `response` is an answer that came from anywhere, to be scored. `paraphrases` are the same question
    in other words. `kind` is the sort of the question. References, ids and kinds may be numbers, other
    fields are texts. `columns` has the names of these fields in files.
    """

    question: str = Field(pattern=r"\S")
    answers: tuple[Text, ...] = ()
    paraphrases: tuple[str, ...] = ()
    context: str | None = None
    response: str | None = None
    id: Text | None = None
    kind: Text | None = None

    @cached_property
    def key(self) -> str:
        """Sixteen hex digits that name question and context, apart from white space."""
        return _digest(self.question, self.context)


@dataclass(frozen=True)
class QuestionFile:
    """The content of a source: its distinct `rows`, and the lines that were left out.

    `problems` are the broken lines, among them those that contradict an earlier one. `duplicates` tells which lines
    repeat an earlier one: in a list of questions copies are not independent draws. `times` tells how often each of the
    rows occurs; empty where none is repeated.
    `shared_ids` tells which lines have an id that an earlier, different one has; they are kept. `unread` are the
    columns that mean nothing here.
    """

    path: Path
    rows: tuple[Question, ...]
    problems: tuple[DataFileError, ...]
    duplicates: tuple[str, ...]
    shared_ids: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    times: tuple[int, ...] = ()


def read_questions(
    path: str | Path, *, needs: Need = "answers", strict: bool = False, columns: Mapping[str, str] | None = None
) -> QuestionFile:
    """Read questions from JSON Lines, JSON (.json), CSV (.csv, .tsv), Excel (.xlsx), Parquet (.parquet), one of these
    packed (.gz, .zip), a folder of such files or a dataset (hub:NAME[:CONFIG][@SPLIT]). The columns of well-known data
    are read by their names (`semgrad_guard.questions.columns`).

    "-" reads JSON Lines, or a JSON list, from standard input. A byte order mark, CRLF and blank lines are fine.

    Args:
        path: one record a line, row or entry, UTF-8. In CSV the first row names the columns; several answers in one
            cell are a JSON list, or one a line.
        needs: the content that every record must have. With an empty list of answers every claim is wrong.
        strict: stop at the first broken one instead of collecting it.
        columns: the columns with another name than usual: that of the `question`, of its `answers`, and of the
            `context` to answer from, which every record must then hold; several texts in it are joined by blank lines.

    Raises:
        DataFileError: the source cannot be read or holds nothing usable; with `strict`, the first broken record.
        InputError: a context column is not a passage.
        MissingExtraError: the library for a dataset, a Parquet or an Excel file is not installed.
    """
    names = columns or {}
    if (passage := names.get("context")) in NO_PASSAGE:
        raise InputError(f'the field "{passage}" is not a passage to answer from; name another as context field')
    source, unread = Path(path), dict[str, None]()
    rows, times = dict[str, tuple[Entry, Question]](), Counter[str]()
    problems: list[DataFileError] = []
    duplicates, shared_ids = list[str](), list[str]()
    owners, ids = dict[str, Entry](), dict[str, Entry]()
    for entry in entries(str(path)):
        try:
            row, found = _read(entry, needs, names)
            key = identity(row, needs)
            first, known = rows.setdefault(key, (entry, row))
            _require_agreement(row, known, entry, first, needs)
        except DataFileError as problem:
            if strict:
                raise
            problems.append(problem)
            continue
        times[key] += 1
        _require_one_meaning(found.columns, entry, owners)
        unread.update(dict.fromkeys(found.unread))
        if first is not entry:
            duplicates.append(f"{entry.place} repeats {first.place_beside(entry)} and is left out.")
        elif row.id is not None and (owner := ids.setdefault(row.id, entry)) is not entry:
            shared_ids.append(f"{entry.place} has the id {row.id!r} of {owner.place_beside(entry)}; both are kept.")
    if not rows and not problems:
        raise DataFileError(f"{called(source)} holds no question: it is empty.")
    if not rows:
        raise DataFileError(f"{called(source)} holds no usable line ({len(problems)} broken). The first: {problems[0]}")
    kept = tuple(row for _, row in rows.values())
    if needs == "answers" and "answers" not in names:
        _require_words(source, kept)
    often = tuple(times[key] for key in rows) if duplicates else ()
    return QuestionFile(source, kept, tuple(problems), tuple(duplicates), tuple(shared_ids), tuple(unread), often)


def with_paraphrases(questions: Sequence[Question]) -> list[Question]:
    """Those that have a paraphrase, a wording other than their own.

    Raises:
        InputError: fewer than two have one: there is nothing to compare.
    """
    found = [question for question in questions if set(question.paraphrases) - {question.question}]
    if len(found) < 2:
        raise InputError(
            f"{len(found)} of the {len(questions)} questions have paraphrases, and a probe needs two at least: add "
            '"paraphrases": ["the same question in other words", ...] to the lines of the file, or let a chat model '
            "write them (--paraphrases)."
        )
    return found


def _require_one_meaning(columns: Mapping[str, str], entry: Entry, owners: dict[str, Entry]) -> None:
    """Refuse a file in which a column holds references in one line and a model's answers in another.

    `owners` are the first lines of either kind.
    """
    for meaning in ("answers", "response"):
        if columns.get(meaning, "").lower() == "answer":
            owners.setdefault(meaning, entry)
    if len(owners) > 1:
        raise DataFileError(
            f'{owners["answers"].place} has its reference in "answer", where {owners["response"].place} has a model\'s '
            "answer, next to the reference: give every line its reference in the same column, or name the column "
            "(--column answers=NAME)"
        )


def _require_words(source: Path, rows: Sequence[Question]) -> None:
    """Refuse references that are all letters or numbers of choices, truth values, labels or grades."""
    found = {answer.strip() for row in rows for answer in row.answers}
    for kind in KNOWN["codes"]:
        if len(rows) >= kind["least"] and len(found) > 1 and all(re.fullmatch(kind["each"], one) for one in found):
            raise DataFileError(
                f"{called(source)} has nothing but {', '.join(sorted(found))[:200]} as references, as choices and "
                "labels are written: give the texts of the right answers (or, if these are the answers, name their "
                "column: --column answers=NAME)."
            )


def _read(entry: Entry, needs: Need, names: Mapping[str, str]) -> tuple[Question, Fields]:
    """The question of an entry, and its fields."""
    content: Any = entry.content
    if isinstance(content, DataFileError):
        raise content
    if not isinstance(content, dict):
        more = "" if needs == "question" else f', "{needs}": ...'
        raise DataFileError(
            f'{entry.place} is not a JSON object: each {entry.unit} looks like {{"question": ...{more}}}.'
        )
    record = cast("dict[str, Any]", content)
    try:
        found = fields_of(record, names, needs=needs, cells=entry.is_text)
    except FaultError as error:
        raise DataFileError(f"{entry.place} {error}.") from error
    except RecursionError as error:
        raise DataFileError(f"{entry.place} is nested too deeply.") from error
    try:
        row = Question.model_validate(found.values)
    except ValidationError as error:
        raise DataFileError(f"{entry.place} {_fault(error, record, found.columns)}.") from error
    given = "answers" in found.values and (not row.answers or any(answer.strip() for answer in row.answers))
    if needs == "answers" and not given:
        naming = "" if "answers" in found.columns else f"; {listed(record)} (or name one: --column answers=NAME)"
        raise DataFileError(
            f'{entry.place} has no reference answer: add "answers": ["..."], or [] where every claim is wrong{naming}.'
        )
    if needs == "response" and not (row.response or "").strip():
        there = "" if "response" in found.columns else f"; {listed(record)}"
        raise DataFileError(f'{entry.place} has no response to score: add "response": "..."{there}.')
    return row, found


def _require_agreement(row: Question, known: Question, entry: Entry, first: Entry, needs: Need) -> None:
    """Refuse a line with the question of an earlier one that differs from it in another field."""
    for field in _COMPARED[needs]:
        mine, theirs = ({" ".join(text.split()) for text in getattr(question, field)} for question in (row, known))
        if mine - theirs or (needs == "answers" and bool(mine) != bool(theirs)):
            raise DataFileError(
                f"{entry.place} asks what {first.place_beside(entry)} asks, with other {field}: keep one of the two, "
                f"with all its {field}."
            )


def _fault(error: ValidationError, record: Record, columns: Mapping[str, str]) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    target, *rest = (str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f'has no "{target}": {listed(record)} (name the right one: --column question=NAME)'
    name = ".".join([columns.get(target, target), *rest])
    if fault["type"] == "string_pattern_mismatch":
        return f'has an empty "{name}"'
    due = _DUE.get(fault["type"])
    return f'has a wrong "{name}": {first_fault(error, place=False) if due is None else f"it must be {due}"}'


def identity(row: Question, needs: Need) -> str:
    """Sixteen hex digits that are the same for lines that repeat each other."""
    return _digest(row.key, row.response) if needs == "response" else row.key


def _digest(*parts: str | None) -> str:
    plain = [None if part is None else " ".join(part.split()) for part in parts]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


_WORD = re.compile(r"\w+")
_ALIKE, _ALIKE_WITH_ONE_ANSWER = 0.9, 0.5
"""Shares of two questions' words, rare ones weighing more, from which on they are close."""

_COMMON = 50
"""A word of more questions than this brings none of them together."""


def wordings(questions: Sequence[Question]) -> list[int]:
    """For each question the number of the first one that it is close to, directly or over others; its own otherwise.

    Copies are close. Two questions are, if they share nearly all of their words; half, if a reference is the same. Of
    passages each is another question.
    """
    copies: dict[str, int] = {}
    firsts = [copies.setdefault(question.key, row) for row, question in enumerate(questions)]
    words = [frozenset(_WORD.findall(question.question.casefold())) for question in questions]
    answers = [{answer.casefold().strip() for answer in question.answers} for question in questions]
    counts = Counter(word for row in copies.values() for word in words[row])
    weight = {word: math.log1p(len(copies) / count) for word, count in counts.items()}
    known = defaultdict[str, list[int]](list)

    def first(row: int) -> int:
        while firsts[row] != row:
            row = firsts[row]
        return row

    for row in copies.values():
        own = words[row]
        rare = [word for word in own if counts[word] <= _COMMON]
        for other in {other for word in rare for other in known[word]}:
            shared = math.fsum(weight[word] for word in own & words[other])
            least = _ALIKE_WITH_ONE_ANSWER if answers[row] & answers[other] else _ALIKE
            close = shared >= least * math.fsum(weight[word] for word in own | words[other])
            if close and questions[row].context == questions[other].context:
                low, high = sorted((first(row), first(other)))
                firsts[high] = low
        for word in rare:
            known[word].append(row)
    return [first(row) for row in range(len(questions))]


Form = Literal["chat", "context"]
Wording = Literal["plain", "paper"]
"""The plain question, or the paper's instruction to answer in few words and the question."""

PAPER_PROMPT = "Please directly answer the following question with one or few words:\n{query}"
"""The paper's template for question answering (appendix, "Prompt Templates")."""

_PIECE = re.compile(r"\{\{|\}\}|\{(?:question|context)\}")
"""The parts of a template that have a meaning, from left to right: a brace, or a place."""


@dataclass(frozen=True)
class Phrasing:
    """How a question is put to the model; plain data.

    Args:
        system: a system message before every question.
        wording: the plain question, or the paper's instruction and the question.
        prompt: a template of the user's turn, with {question} in it and, for questions about a passage, {context};
            braces that are meant as such are doubled, {{ and }}, as in Python and LangChain (`require` checks it).
    """

    system: str | None = None
    wording: Wording = "plain"
    prompt: str | None = None

    def conversation(self, row: Question) -> list[Message]:
        """The messages for a question: its turn, with the passage if there is one.

        The turn names the bare question, for methods that compare questions or paraphrase them without the instruction.
        """
        if self.prompt is None:
            turn = in_context(row.question, row.context)
        else:  # its places are filled in one pass: inserted text is not searched for places
            given = {"{question}": row.question, "{context}": row.context or "", "{{": "{", "}}": "}"}
            turn = _PIECE.sub(lambda piece: given[piece.group()], self.prompt)
        if self.wording == "paper":
            turn = PAPER_PROMPT.replace("{query}", turn)
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, Message("user", turn, question=row.question, context=row.context)]

    def name(self, rows: Sequence[Question] = ()) -> str:
        """The name of such prompts in a calibration; it depends on system message, wording and template.

        Raises:
            InputError: some of the questions have a context and some have none.
        """
        form = form_of(rows)
        name = form if self.wording == "plain" else f"{self.wording}-{form}"
        parts = (("system", self.system), ("prompt", self.prompt))
        digests = [(kind, hashlib.sha256(text.encode()).hexdigest()) for kind, text in parts if text is not None]
        return "+".join([name, *(f"{kind}-{digest[:8]}" for kind, digest in digests)])

    def require(self, rows: Sequence[Question]) -> None:
        """Refuse a template that does not go with the questions.

        Raises:
            InputError: as for `require_prompt`, or the questions have two forms.
        """
        form = form_of(rows)
        if self.prompt is not None:
            require_prompt(self.prompt, form)

    def forms(
        self, rows: Iterable[Question], rendered: Callable[[list[Message]], PromptForm | None]
    ) -> list[PromptForm | None]:
        """The forms of the questions' prompts as a model sees them; `rendered` is its own.

        None is a prompt that exceeds the context window by far, and so was never sent.
        """

        def form(row: Question) -> PromptForm | None:
            try:
                return rendered(self.conversation(row))
            except PromptTooLongError:
                return None

        return [form(row) for row in rows]


def require_prompt(prompt: str, form: Form) -> None:
    """Refuse a template that does not go with the form of the questions.

    Raises:
        InputError: it has no place for the question, or one for a context where there is none, or the other way round;
            or a brace in it is neither part of a place nor doubled: if it were sent, a misspelt place would be a
            promise about other prompts than those that were meant.
    """
    places = set(_PIECE.findall(prompt))
    if stray := next((part for part in _PIECE.split(prompt) if "{" in part or "}" in part), ""):
        shown = re.search(r"\{[^{}]*\}|[{}]", stray)
        raise InputError(
            f"the prompt has {'' if shown is None else shown.group()[:60]} in it, which is not a place: there are "
            "{question} and {context}; double a brace that is meant as such: {{ or }}"
        )
    if "{question}" not in places:
        raise InputError("the prompt has no {question} in it: write it where the question is to stand")
    if ("{context}" in places) != (form == "context"):
        raise InputError(
            "the questions have a context and the prompt has no {context} in it: write it where the context is to stand"
            if form == "context"
            else "the prompt has a {context} in it and the questions have none: say where it is (--context of ask, "
            "--column context=NAME of the other commands)"
        )


def form_of(rows: Sequence[Question]) -> Form:
    """The one form that these questions' prompts have.

    Raises:
        InputError: some questions have a context and some have none: their scores do not compare.
    """
    contexts = sum(row.context is not None for row in rows)
    if contexts not in (0, len(rows)):
        raise InputError(
            f"{contexts} of the {len(rows)} questions have a context and the others none; their uncertainties do not "
            "compare. Put them into two files and calibrate each form of prompt by itself."
        )
    return "context" if contexts else "chat"
