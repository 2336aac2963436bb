"""Grading a run's answers, after the run and without its model; what a model or a judge said is kept and not redone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.files import first_line
from semgrad_guard.evaluation.graders.base import AnswerGrader, AnswerToGrade, Verdicts, WordGrader
from semgrad_guard.evaluation.progress import Progress, unwatched
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.evaluated import EvaluatedAnswer

_AT_ONCE = 32


class GradeBook:
    """Verdicts at `path`, by grader and content: a changed reference or answer is graded anew.

    Lines are appended whole; a kill can cut the last one short, which the next use removes. Replies that were no
    verdict are not kept: they are asked for again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, str], bool] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            self._read(line, number)
        if len(whole) < len(content):
            path.write_bytes(whole)

    def known(self, grader: str, answer: AnswerToGrade) -> bool | None:
        """The verdict there is, None without one."""
        return self._known.get((grader, _digest(answer)))

    def add(self, grader: str, answers: Sequence[AnswerToGrade], verdicts: Verdicts) -> None:
        """Keep verdicts."""
        fresh = [(_digest(answer), verdict) for answer, verdict in zip(answers, verdicts, strict=True)]
        kept = [(digest, verdict) for digest, verdict in fresh if verdict is not None]
        self._known.update(((grader, digest), verdict) for digest, verdict in kept)
        records = [{"grader": grader, "answer": digest, "correct": verdict} for digest, verdict in kept]
        try:
            with self.path.open("ab") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records).encode())
        except OSError as error:
            raise InputError(f"Cannot write {self.path}: {error.strerror or error}.") from error

    def _read(self, line: bytes, number: int) -> None:
        try:
            record: Any = json.loads(line)
            grader, answer, correct = (record[name] for name in ("grader", "answer", "correct"))
        except (ValueError, TypeError, KeyError, RecursionError):
            grader, answer, correct = None, None, None
        if not (isinstance(grader, str) and isinstance(answer, str) and isinstance(correct, bool)):
            raise InputError(f"{self.path}, line {number} is no grade; delete the line, and it will be graded again.")
        self._known[grader, answer] = correct


def grade(
    answers: Sequence[EvaluatedAnswer],
    grader: AnswerGrader,
    book: GradeBook | None = None,
    *,
    on_progress: Progress | None = None,
) -> Verdicts:
    """A verdict for each answer; None where the grader came to none. Without a text an answer is wrong.

    Raises:
        GradingError: the grader cannot do its work; verdicts given so far are in the book.
    """
    items = [AnswerToGrade(each.question, each.text or "", each.references) for each in answers]
    return grade_texts(items, grader, book, on_progress=on_progress)


def grade_texts(
    items: Sequence[AnswerToGrade],
    grader: AnswerGrader,
    book: GradeBook | None = None,
    *,
    on_progress: Progress | None = None,
) -> Verdicts:
    """Like `grade`, for texts with their questions and references."""
    tell = on_progress or unwatched
    found: dict[AnswerToGrade, bool | None] = {item: False for item in items if not item.text.strip()}
    book = None if isinstance(grader, WordGrader) else book
    if book is not None:
        found |= {item: verdict for item in items if (verdict := book.known(grader.name, item)) is not None}
    waiting = [item for item in dict.fromkeys(items) if item not in found]
    tell(len(items) - len(waiting), len(items))
    for start in range(0, len(waiting), _AT_ONCE):
        batch = waiting[start : start + _AT_ONCE]
        verdicts = grader.grade(batch)
        if book is not None:
            book.add(grader.name, batch, verdicts)
        found.update(zip(batch, verdicts, strict=True))
        tell(len(items) - len(waiting) + start + len(batch), len(items))
    return [found[item] for item in items]


def with_references(answers: Sequence[EvaluatedAnswer], questions: Sequence[Question]) -> list[EvaluatedAnswer]:
    """The answers with the references and kinds that the questions have now: data may be mended after a run."""
    now = {question.key: {"references": question.answers, "kind": question.kind} for question in questions}
    return [answer.model_copy(update=now.get(answer.key, {})) for answer in answers]


def is_grade_book(path: Path) -> bool:
    """Whether a file is a `GradeBook`'s; a kill can leave a stump of its first line."""
    return first_line(path).startswith(b'{"grader": ')


def _digest(answer: AnswerToGrade) -> str:
    parts = cast("list[Any]", [answer.question, answer.text, list(answer.references)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
