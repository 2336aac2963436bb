"""Grading the answers of a run, after the run and without its model, and a look at the grades before they count.

Verdicts of a model or a judge are recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict

from semgrad_guard.evaluation.graders.base import AnswerGrader, AnswerToGrade, SecondOpinion, Verdicts, WordGrader
from semgrad_guard.evaluation.graders.labels import NAME
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
    items = [
        AnswerToGrade(one.question, one.text or "", one.references, True, one.context)
        if one.part_of is not None
        else AnswerToGrade(one.question, one.text or "", one.references)
        for one in answers
    ]
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
    return [answer.model_copy(update=now.get(answer.part_of or answer.key, {})) for answer in answers]


def _key(grader: str, digest: str) -> str:
    return f"{digest} {grader}"


def _digest(answer: AnswerToGrade) -> str:
    parts = cast("list[Any]", [answer.question, answer.text, list(answer.references)])
    parts += ["sentence", answer.passage] if answer.sentence else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


SHOWN = 10
_AT_LEAST_OF_EACH = 3
FEWEST, MOST = 0.05, 0.95
_LONGEST = 160


@dataclass(frozen=True)
class GradedAnswer:
    """An answer with its grade; None: the grader came to no verdict."""

    question: str
    text: str
    references: tuple[str, ...]
    correct: bool | None

    def __str__(self) -> str:
        """One line of a list."""
        grade = "no verdict" if self.correct is None else "right" if self.correct else "wrong"
        texts = (
            self.question,
            self.references[0] if self.references else "no answer is right",
            self.text or "(no text)",
        )
        question, reference, text = (_short(text) for text in texts)
        return f"  {grade}: {question} [{reference}] {text}"


def some_of(answers: Sequence[GradedAnswer]) -> list[GradedAnswer]:
    """Up to `SHOWN` of them in order, drawn with a fixed seed; of each grade three at least, if there are."""
    rng = np.random.default_rng(len(answers))
    drawn: list[int] = rng.permutation(len(answers)).tolist()
    chosen = drawn[:SHOWN]
    for grade in (True, False):
        held = [i for i in chosen if bool(answers[i].correct) is grade]
        others = [i for i in drawn if bool(answers[i].correct) is grade and i not in held]
        wanted = min(_AT_LEAST_OF_EACH - len(held), len(others), SHOWN - len(held))
        if wanted > 0 and len(chosen) == SHOWN:
            spare = [i for i in chosen if bool(answers[i].correct) is not grade][-wanted:]
            chosen = [*(i for i in chosen if i not in spare), *others[:wanted]]
    return [answers[i] for i in sorted(chosen)]


def doubt(correct: Sequence[bool], grader: str, *, unit: str = "answers") -> str | None:
    """A warning where hardly any answer is right by this grader, or nearly all are; None between."""
    right, n = sum(correct), len(correct)
    if not n or FEWEST <= right / n <= MOST:
        return None
    seen = "less than 5 %" if right < n / 2 else "more than 95 %"
    found = f"{right} of {n} {unit} are right by {grader}, {seen}. Either the model is like that, or the"
    if grader == NAME:
        return f"{found} column 'correct' does not say what it should: compare some rows with their answers."
    cause = "misses right answers in another form" if right < n / 2 else "lets wrong answers pass"
    return f"{found} grader {cause}: read the answers. Choose another grader, or grade by hand with a file of labels."


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
