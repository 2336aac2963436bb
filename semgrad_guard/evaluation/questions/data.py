"""Reading a user's questions, from a file or a dataset: broken lines are named and the rest is not lost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from semgrad_guard.errors import DataFileError, InputError
from semgrad_guard.evaluation.files import called
from semgrad_guard.evaluation.questions.sources import Entry, entries

Need = Literal["answers", "response", "question"]
"""What a line must hold: reference answers (to calibrate), a response (to score), or a question and no more."""


def _numeral(value: Any) -> Any:
    """A number as text: a reference may be 42, an id 7. NaN and infinity are none; a question is never a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and math.isfinite(value) else value


def _listed(value: Any) -> Any:
    """One text as a list of one, and the forms that well-known datasets give to several (TriviaQA, SQuAD)."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        return [value] if isinstance(value, str | int | float) else value
    record = cast("dict[str, Any]", value)
    known = [_listed(record[name]) for name in ("value", "aliases", "text") if name in record]
    if not all(isinstance(texts, list | tuple) for texts in known):
        return record
    texts = [text for texts in known for text in cast("Iterable[Any]", texts)]
    return [text for number, text in enumerate(texts) if text not in texts[:number]] if known else record


Text = Annotated[str, BeforeValidator(_numeral)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_listed)]
_ANSWERS = AliasChoices("answers", "answer", "correct_answers", "correct_answer")
_KIND = AliasChoices("kind", "category")
NO_PASSAGE = ("question", *map(str, _ANSWERS.choices), "paraphrases", "response", "id", *map(str, _KIND.choices))
"""Fields that mean something else than a passage to answer from; the answers among them would give the answer away."""
_COMPARED: dict[Need, tuple[str, ...]] = {
    "answers": ("answers",),
    "question": ("answers", "paraphrases"),
    "response": (),
}
"""What lines with the same question must agree in."""
_DUE = {
    "string_type": "text",
    "string_unicode": "text without lone surrogates",
    "tuple_type": "a text or a list of them",
}


class Question(BaseModel):
    """One line of a data file.

    `answers` are the references, any of which counts as correct; datasets call them `answer`, `correct_answer` or
    `correct_answers` as well. `context` is a passage to answer from. `response` is an answer that came from anywhere,
    to be scored. `paraphrases` ask the same thing in other words. `kind` (or `category`) says what sort of question it
    is. Other fields of the line are left alone. Numbers may stand for references, ids and kinds, not for other texts.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    question: str = Field(pattern=r"\S")
    answers: Texts = Field(default=(), validation_alias=_ANSWERS)
    paraphrases: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    context: str | None = None
    response: str | None = None
    id: Text | None = None
    kind: Text | None = Field(default=None, validation_alias=_KIND)

    @cached_property
    def key(self) -> str:
        """Sixteen hex digits that name what is asked: question and context, apart from white space."""
        return _digest(self.question, self.context)


@dataclass(frozen=True)
class QuestionFile:
    """What a source holds: its distinct `rows`, and what was left out, named by line.

    `problems` are the broken lines, among them those that contradict an earlier one. `duplicates` says which lines
    repeat an earlier one: copies are not independent draws, and would make a calibration set look larger than it is.
    `shared_ids` says which lines have an id that an earlier, different one has; they are kept.
    """

    path: Path
    rows: tuple[Question, ...]
    problems: tuple[DataFileError, ...]
    duplicates: tuple[str, ...]
    shared_ids: tuple[str, ...] = ()


def read_questions(
    path: str | Path, *, needs: Need = "answers", strict: bool = False, context_field: str | None = None
) -> QuestionFile:
    """Read questions from JSON Lines, a JSON list (.json), CSV (.csv, .tsv), Parquet (.parquet), a folder of such files
    or a dataset (hub:NAME[:CONFIG][@SPLIT]).

    "-" reads JSON Lines, or a JSON list, from standard input. A byte order mark, CRLF and blank lines are fine.

    Args:
        path: one record a line, row or entry, UTF-8. In CSV the first row names the columns; several answers in one
            cell are a JSON list, or stand one a line.
        needs: what every record must hold.
        strict: stop at the first broken one instead of collecting it.
        context_field: the field with the passage to answer from, which every record must then hold; several texts in
            it are joined by blank lines. Without it, `context`, which records may lack.

    Raises:
        DataFileError: the source cannot be read or holds nothing usable; with `strict`, the first broken record.
        InputError: `context_field` names a field that is no passage.
        MissingExtraError: a dataset or a Parquet file is asked for and its library is not installed.
    """
    if context_field in NO_PASSAGE:
        raise InputError(f'the field "{context_field}" is no passage to answer from; name another as context field')
    rows: dict[str, tuple[Entry, Question]] = {}
    problems: list[DataFileError] = []
    duplicates: list[str] = []
    for entry in entries(str(path)):
        try:
            row = _read(entry, needs, context_field)
            first, known = rows.setdefault(identity(row, needs), (entry, row))
            _require_agreement(row, known, entry, first, needs)
        except DataFileError as problem:
            if strict:
                raise
            problems.append(problem)
            continue
        if first is not entry:
            duplicates.append(f"{entry.place} repeats {first.place_beside(entry)} and is left out.")
    source = Path(path)
    if not rows:
        raise _nothing_in(source, problems)
    kept = tuple(row for _, row in rows.values())
    return QuestionFile(source, kept, tuple(problems), tuple(duplicates), _shared_ids(rows.values()))


def with_paraphrases(questions: Sequence[Question]) -> list[Question]:
    """Those that have a paraphrase, a wording other than their own.

    Raises:
        InputError: fewer than two have one: there is nothing to compare.
    """
    found = [question for question in questions if set(question.paraphrases) - {question.question}]
    if len(found) < 2:
        raise InputError(
            f"{len(found)} of the {len(questions)} questions have paraphrases, and a probe needs two at least: add "
            '"paraphrases": ["the same question in other words", ...] to the lines of the file.'
        )
    return found


def _shared_ids(rows: Iterable[tuple[Entry, Question]]) -> tuple[str, ...]:
    firsts: dict[str, Entry] = {}
    notes: list[str] = []
    for entry, row in rows:
        if row.id is not None and (first := firsts.setdefault(row.id, entry)) is not entry:
            notes.append(f"{entry.place} has the id {row.id!r} of {first.place_beside(entry)}; both are kept.")
    return tuple(notes)


def _read(entry: Entry, needs: Need, context_field: str | None) -> Question:
    content: Any = entry.content
    if isinstance(content, DataFileError):
        raise content
    if not isinstance(content, dict):
        more = "" if needs == "question" else f', "{needs}": ...'
        raise DataFileError(f'{entry.place} is no JSON object: each {entry.unit} looks like {{"question": ...{more}}}.')
    record = cast("dict[str, Any]", content)
    if context_field is not None:
        record = {**record, "context": _passage(record, context_field, entry.place)}
    _require_one_name(record, entry.place)
    try:
        row = Question.model_validate(record)
    except (ValidationError, RecursionError) as error:
        raise DataFileError(f"{entry.place} {_fault(error)}.") from error
    _require(row, needs, entry.place)
    return row


def _require_agreement(row: Question, known: Question, entry: Entry, first: Entry, needs: Need) -> None:
    """Refuse a line that asks what an earlier one asks, and says something about it which that one does not say."""
    for field in _COMPARED[needs]:
        mine, theirs = ({" ".join(text.split()) for text in getattr(each, field)} for each in (row, known))
        if mine - theirs:
            raise DataFileError(
                f"{entry.place} asks what {first.place_beside(entry)} asks, with other {field}: keep one of the two, "
                f"with all its {field}."
            )


def _require_one_name(record: dict[str, Any], where: str) -> None:
    """Refuse a field under two names with two contents: one of them would be taken, and nobody knows which."""
    for names in (_ANSWERS.choices, _KIND.choices):
        given = [str(name) for name in names if record.get(str(name)) is not None]
        if any(_listed(record[name]) != _listed(record[given[0]]) for name in given[1:]):
            raise DataFileError(f"{where} has {' and '.join(map(json.dumps, given))}, which are one field; keep one.")


def _passage(record: dict[str, Any], field: str, where: str) -> str:
    """The text in a field, or the texts in a list, as retrievers return them."""
    value: Any = record.get(field)
    given = cast("list[Any]", value) if isinstance(value, list) else [value]
    texts = [text for text in given if isinstance(text, str) and text.strip()]
    if not texts or len(texts) < len(given):
        raise DataFileError(f'{where} has no text in "{field}": it must hold one, or a list of some.')
    return "\n\n".join(texts)


def _require(row: Question, needs: Need, where: str) -> None:
    if needs == "answers" and not any(answer.strip() for answer in row.answers):
        raise DataFileError(f'{where} has no reference answer: add "answers": ["..."].')
    if needs == "response" and not (row.response or "").strip():
        raise DataFileError(f'{where} has no response to score: add "response": "...".')


def _fault(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f'has no "{field}"'
    if fault["type"] == "string_pattern_mismatch":
        return f'has an empty "{field}"'
    if fault["type"] in _DUE:
        return f'has a wrong "{field}": it must be {_DUE[fault["type"]]}'
    return f'has a wrong "{field}": {fault["msg"][0].lower()}{fault["msg"][1:]}'


def _nothing_in(source: Path, problems: list[DataFileError]) -> DataFileError:
    if not problems:
        return DataFileError(f"{called(source)} holds no question: it is empty.")
    return DataFileError(f"{called(source)} holds no usable line ({len(problems)} broken). The first: {problems[0]}")


def identity(row: Question, needs: Need) -> str:
    """Sixteen hex digits that are the same for lines that repeat each other."""
    return _digest(row.key, row.response) if needs == "response" else row.key


def _digest(*parts: str | None) -> str:
    plain = [None if part is None else " ".join(part.split()) for part in parts]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
