"""Grading the answers of a run, after the run and without its model; verdicts of a model or a judge are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from semgrad_guard.evaluation.graders.base import AnswerGrader, AnswerToGrade, SecondOpinion, Verdicts, WordGrader
from semgrad_guard.evaluation.job_record import JobRecord, Progress, unwatched
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.answers import EvaluatedAnswer

GRADES = "grades"
"""The kind of the record that keeps verdicts of models and judges."""
_AT_ONCE = 32


class Grade(BaseModel):
    """The verdict of a grader on an answer: a line of the record of grades.

    `answer` is the digest of the answer, its question and its references, so that a change of one is graded anew.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    grader: str
    answer: str
    correct: bool

    @property
    def key(self) -> str:
        """Unique in the record."""
        return _key(self.grader, self.answer)


def grade(
    answers: Sequence[EvaluatedAnswer],
    grader: AnswerGrader,
    book: Path | None = None,
    *,
    on_progress: Progress | None = None,
) -> Verdicts:
    """A verdict for each answer; None where the grader came to none. Without a text an answer is wrong.

    Raises:
        GradingError: the grader cannot do its work; earlier verdicts are in the record at `book`.
        InputError: that record cannot be read or written.
    """
    items = [AnswerToGrade(answer.question, answer.text or "", answer.references) for answer in answers]
    return grade_texts(items, grader, book, on_progress=on_progress)


def grade_texts(
    items: Sequence[AnswerToGrade],
    grader: AnswerGrader,
    book: Path | None = None,
    *,
    on_progress: Progress | None = None,
) -> Verdicts:
    """Like `grade`, for texts with their questions and references."""
    if isinstance(grader, SecondOpinion):
        first, second = grader.first, grader.second
        return grader.merge(
            grade_texts(items, first, book, on_progress=on_progress),
            lambda without: grade_texts([items[i] for i in without], second, book, on_progress=on_progress),
        )
    if book is None or isinstance(grader, WordGrader):
        return _graded(items, grader, None, on_progress or unwatched)
    with JobRecord(book, {}, Grade, kind=GRADES) as record:
        return _graded(items, grader, record, on_progress or unwatched)


def _graded(
    items: Sequence[AnswerToGrade], grader: AnswerGrader, record: JobRecord[Grade] | None, tell: Progress
) -> Verdicts:
    """Verdicts from the record, and else from the grader; a missing verdict is not recorded, so it is tried again."""
    verdicts: dict[AnswerToGrade, bool | None] = {item: False for item in items if not item.text.strip()}
    if record is not None:
        recorded = {item: record.rows.get(_key(grader.name, _digest(item))) for item in items}
        verdicts |= {item: grade.correct for item, grade in recorded.items() if grade is not None}
    waiting = [item for item in dict.fromkeys(items) if item not in verdicts]
    tell(len(items) - len(waiting), len(items))
    for start in range(0, len(waiting), _AT_ONCE):
        batch = waiting[start : start + _AT_ONCE]
        fresh = dict(zip(batch, grader.grade(batch), strict=True))
        if record is not None:
            record.append(
                Grade(grader=grader.name, answer=_digest(item), correct=correct)
                for item, correct in fresh.items()
                if correct is not None
            )
        verdicts.update(fresh)
        tell(len(items) - len(waiting) + start + len(batch), len(items))
    return [verdicts[item] for item in items]


def with_references(answers: Sequence[EvaluatedAnswer], questions: Sequence[Question]) -> list[EvaluatedAnswer]:
    """The answers with the references and kinds that the questions have now: data may be mended after a run."""
    now = {question.key: {"references": question.answers, "kind": question.kind} for question in questions}
    return [answer.model_copy(update=now.get(answer.key, {})) for answer in answers]


def _key(grader: str, digest: str) -> str:
    return f"{digest} {grader}"


def _digest(answer: AnswerToGrade) -> str:
    parts = cast("list[Any]", [answer.question, answer.text, list(answer.references)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
