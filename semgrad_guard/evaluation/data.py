"""Reading a user's JSON Lines file: one question a line, broken lines named and the rest not lost."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from semgrad_guard.errors import DataFileError

Need = Literal["answers", "response"]
"""What a line must hold beside its question: reference answers (to calibrate), or a response (to score)."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Question(BaseModel):
    """One line of a data file.

    `answers` are the references, any of which counts as correct. `context` is a passage to answer from. `response` is
    an answer that came from anywhere, to be scored. `paraphrases` ask the same thing in other words. Other fields of
    the line are left alone.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    question: str = Field(pattern=r"\S")
    answers: Texts = ()
    paraphrases: Texts = ()
    context: str | None = None
    response: str | None = None
    id: str | None = None

    @cached_property
    def key(self) -> str:
        """Sixteen hex digits that name what is asked: question and context, apart from white space."""
        return _digest(self.question, self.context)


@dataclass(frozen=True)
class QuestionFile:
    """What a file holds: its distinct `rows`, and what was left out, named by line.

    `problems` are the broken lines. `duplicates` says which lines repeat an earlier one: copies are not independent
    draws, and would make a calibration set look larger than it is.
    """

    path: Path
    rows: tuple[Question, ...]
    problems: tuple[DataFileError, ...]
    duplicates: tuple[str, ...]


def read_questions(path: str | Path, *, needs: Need = "answers", strict: bool = False) -> QuestionFile:
    """Read a JSON Lines file; a byte order mark, CRLF and blank lines are fine.

    Args:
        path: one JSON object a line, UTF-8.
        needs: what every line must hold beside its question.
        strict: stop at the first broken line instead of collecting it.

    Raises:
        DataFileError: the file cannot be read or holds no usable line; with `strict`, the first broken line.
    """
    source = Path(path)
    rows: dict[str, tuple[int, Question]] = {}
    problems: list[DataFileError] = []
    duplicates: list[str] = []
    for number, line in _lines(source):
        try:
            row = _parse(line, needs, where=f"{source}, line {number}")
        except DataFileError as problem:
            if strict:
                raise
            problems.append(problem)
            continue
        first, _ = rows.setdefault(_identity(row, needs), (number, row))
        if first != number:
            duplicates.append(f"{source}, line {number} repeats line {first} and is left out.")
    if not rows:
        raise _nothing_in(source, problems)
    return QuestionFile(source, tuple(row for _, row in rows.values()), tuple(problems), tuple(duplicates))


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1. Only line feeds end a line: JSON strings may hold U+2028."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DataFileError(f"Cannot read {source}: {error.strerror or error}.") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataFileError(f"{source} is UTF-16 text; save it as UTF-8.")
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: bytes, needs: Need, *, where: str) -> Question:
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict):
            raise DataFileError(f'{where} is no JSON object: each line looks like {{"question": ..., "{needs}": ...}}.')
        row = Question.model_validate(record)
    except UnicodeDecodeError as error:
        raise DataFileError(f"{where} is not UTF-8 text (byte {error.start + 1} of the line).") from error
    except json.JSONDecodeError as error:
        raise DataFileError(f"{where} is not valid JSON: {error.msg} at column {error.colno}.") from error
    except (ValidationError, RecursionError) as error:
        raise DataFileError(f"{where} {_fault(error)}.") from error
    _require(row, needs, where)
    return row


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
    return f'has a wrong "{field}": {fault["msg"][0].lower()}{fault["msg"][1:]}'


def _nothing_in(source: Path, problems: list[DataFileError]) -> DataFileError:
    if not problems:
        return DataFileError(f"{source} holds no question: it is empty.")
    return DataFileError(f"{source} holds no usable line ({len(problems)} broken). The first: {problems[0]}")


def _identity(row: Question, needs: Need) -> str:
    return _digest(row.key, row.response) if needs == "response" else row.key


def _digest(*parts: str | None) -> str:
    plain = [None if part is None else " ".join(part.split()) for part in parts]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
