"""Grading the answers of a run, after the run and without its model, and a look at the grades before they count.

Verdicts of a model or a judge are recorded. People grade in a sheet: written for a spreadsheet program, and read back
as it saves it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel

from semgrad_guard.errors import GradingError
from semgrad_guard.files import STDIN
from semgrad_guard.grading.grader import (
    ABSTAINED,
    AnswerGrader,
    AnswerToGrade,
    Grade,
    SecondOpinion,
    Verdicts,
    WordGrader,
)
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import Row, append_rows, read_table, write_table
from semgrad_guard.questions.run_record import EvaluatedAnswer, JobRecord, Progress, unwatched

GRADES = "grades"
"""The kind of the record that keeps verdicts of models and judges."""
_AT_ONCE = 32


class GradeRow(BaseModel, frozen=True, extra="forbid", strict=True):
    """The verdict of a grader on an answer: a line of the record of grades.

    `answer` is the digest of the answer, its question and its references, so that a change of one is graded anew.
    """

    grader: str
    answer: str
    correct: bool

    @property
    def key(self) -> str:
        """Unique in the record."""
        return f"{self.answer} {self.grader}"


@dataclass(frozen=True)
class SheetAnswer:
    """An answer, or a `sentence` of one, that a person can grade; `text` is None where there is none.

    `passage` is what the question was asked with.
    """

    key: str
    question: str
    references: tuple[str, ...]
    text: str | None
    passage: str = ""
    sentence: bool = False

    @classmethod
    def of(cls, answer: EvaluatedAnswer) -> SheetAnswer:
        """A row of a run's answers."""
        about = (answer.key, answer.question, answer.references, answer.text, answer.context or "")
        return cls(*about, sentence=answer.part_of is not None)

    @property
    def to_grade(self) -> AnswerToGrade:
        """The same for a grader; it sees the passage of a sentence alone."""
        passage = (self.sentence and self.passage) or None
        return AnswerToGrade(self.question, self.text or "", self.references, self.sentence, passage)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in a sheet."""
        texts = (self.question, self.passage, "\n".join(self.references), self.text or "")
        return self.key, *(cell.replace("\0", _NULL) for cell in texts), ""

    def graded(self, grade: Grade | None) -> str:
        """One line of a list: the answer with its grade; None: the grader came to no verdict."""
        word = "no verdict" if grade is None else {True: "right", False: "wrong", ABSTAINED: ABSTAINED}[grade]
        reference = self.references[0] if self.references else "no answer is right"
        question, reference, text = map(_short, (self.question, reference, self.text or "(no text)"))
        return f"  {word}: {question} [{reference}] {text}"


def grade(
    items: Sequence[AnswerToGrade],
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
    if isinstance(grader, SecondOpinion):
        first, second = grader.first, grader.second
        return grader.merge(
            grade(items, first, book, on_progress=on_progress),
            lambda without: grade([items[i] for i in without], second, book, on_progress=on_progress),
        )
    if book is None or isinstance(grader, WordGrader):
        return _graded(items, grader, None, on_progress or unwatched)
    with JobRecord(book, {}, GradeRow, kind=GRADES) as record:
        return _graded(items, grader, record, on_progress or unwatched)


def _graded(
    items: Sequence[AnswerToGrade], grader: AnswerGrader, record: JobRecord[GradeRow] | None, tell: Progress
) -> Verdicts:
    """Verdicts from the record, and else from the grader; a missing verdict is not recorded, so it is tried again (and
    an abstention costs nothing)."""
    verdicts: dict[AnswerToGrade, Grade | None] = {item: False for item in items if not item.text.strip()}
    if record is not None:
        recorded = {item: record.rows.get(f"{_digest(item)} {grader.name}") for item in items}
        verdicts |= {item: grade.correct for item, grade in recorded.items() if grade is not None}
    waiting = [item for item in dict.fromkeys(items) if item not in verdicts]
    tell(len(items) - len(waiting), len(items))
    for start in range(0, len(waiting), _AT_ONCE):
        batch = waiting[start : start + _AT_ONCE]
        fresh = dict(zip(batch, grader.grade(batch), strict=True))
        if record is not None:
            record.append(
                GradeRow(grader=grader.name, answer=_digest(item), correct=correct)
                for item, correct in fresh.items()
                if isinstance(correct, bool)
            )
        verdicts.update(fresh)
        tell(len(items) - len(waiting) + start + len(batch), len(items))
    return [verdicts[item] for item in items]


def with_references(answers: Sequence[EvaluatedAnswer], questions: Sequence[Question]) -> list[EvaluatedAnswer]:
    """The answers with the references and kinds that the questions have now: data may be mended after a run."""
    now = {question.key: {"references": question.answers, "kind": question.kind} for question in questions}
    return [answer.model_copy(update=now.get(answer.part_of or answer.key, {})) for answer in answers]


def _digest(answer: AnswerToGrade) -> str:
    parts = cast("list[Any]", [answer.question, answer.text, list(answer.references)])
    parts += ["sentence", answer.passage] if answer.sentence else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


SHOWN = 10
FEWEST, MOST = 0.05, 0.95
_LONGEST = 160


def some_of(grades: Sequence[Grade | None]) -> list[int]:
    """The places of up to `SHOWN` answers in order, drawn with a fixed seed, as many right ones as others where there
    are."""
    drawn: list[int] = np.random.default_rng(len(grades)).permutation(len(grades)).tolist()
    right = [place for place in drawn if grades[place] is True]
    others = [place for place in drawn if grades[place] is not True]
    few = min(len(right), max(SHOWN // 2, SHOWN - len(others)))
    return sorted([*right[:few], *others[: SHOWN - few]])


def doubt(grades: Sequence[Grade | None], grader: str, *, unit: str = "answers") -> str | None:
    """A warning where hardly any answer is right by this grader, or nearly all are, abstentions aside; None between."""
    right, n = grades.count(True), len(grades) - grades.count(ABSTAINED)
    if not n or FEWEST <= right / n <= MOST:
        return None
    seen = "less than 5 %" if right < n / 2 else "more than 95 %"
    found = f"{right} of {n} {unit} are right by {grader}, {seen}. Either the model is like that, or the"
    if grader == HUMAN:
        return f"{found} column 'correct' does not say what it should: compare some rows with their answers."
    cause = "misses right answers in another form" if right < n / 2 else "lets wrong answers pass"
    return f"{found} grader {cause}: read the answers. Choose another grader, or grade by hand with a file of labels."


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


COLUMNS = ("key", "question", "passage", "references", "answer", "correct")
_NULL = "\N{REPLACEMENT CHARACTER}"
"""In place of a null byte, which no table can hold; models write anything."""

HUMAN = "human"
"""The name of people among the graders."""

# Spreadsheet programs write TRUE and FALSE in the language of their user.
_YES = {"1", "1.0", "true", "yes", "y", "x", "correct", "right", "wahr", "vrai", "verdadero", "vero"}
_ABSTAINED = {ABSTAINED, "abstain", "abstention", "abstains"}
_NO = {"0", "0.0", "false", "no", "n", "incorrect", "wrong", "falsch", "faux", "falso"}


def write_sheet(path: Path, answers: Sequence[SheetAnswer]) -> Path:
    """Write the sheet: one row per answered question, references one a line, the column `correct` empty."""
    return write_table(path, COLUMNS, [answer.cells for answer in answers if answer.text is not None])


def extend_sheet(path: Path, answers: Sequence[SheetAnswer]) -> int:
    """Begin the sheet, or add rows for the answers that it lacks; returns how many. Its rows stay as they are.

    Raises:
        DataFileError: the file there is not a table.
        GradingError: it has no column for the key.
    """
    answered = [answer for answer in answers if answer.text is not None]
    if not path.exists():
        write_sheet(path, answered)
        return len(answered)
    names, rows = open_sheet(path)
    there = {_row_key(row) for row in rows}
    missing = [answer for answer in answered if answer.key not in there]
    new: list[dict[str, str]] = [dict(zip(COLUMNS, answer.cells, strict=True)) for answer in missing]
    append_rows(path, [[cells.get(name, "") for name in names] for cells in new])
    return len(new)


def open_sheet(path: Path) -> tuple[list[str], list[Row]]:
    """(column names, rows) of a sheet.

    Raises:
        DataFileError: the file cannot be read, or is not a table.
        GradingError: it is not a sheet: a column is missing, or a row has more cells than there are columns.
    """
    names, rows = read_table(path)
    if missing := [name for name in ("key", "correct") if name not in names]:
        raise GradingError(f"{path} has no column {missing[0]!r}; keep those of the sheet: {', '.join(COLUMNS)}.")
    if row := next((row for row in rows if row.fault), None):
        raise GradingError(f"{path}, row {row.number} {row.fault}.")
    return names, rows


def labels_for(path: Path, answers: Sequence[SheetAnswer], *, others: Collection[str] = ()) -> Verdicts:
    """The labels of these answers, from a sheet that is begun or extended first (standard input is only read).

    Args:
        path: the sheet.
        answers: in order.
        others: keys of further answers of the same run, whose rows are passed over.

    Raises:
        GradingError: it holds no label yet, or see `read_sheet`.
    """
    if path != STDIN and not path.exists():
        extend_sheet(path, answers)
    labels = read_sheet(path, answers, others=others)
    if path != STDIN:  # only now: another table than this run's sheet is not touched
        extend_sheet(path, answers)
    if labels.count(None) == len(labels):
        raise GradingError(
            f"{path} has {len(labels)} rows and no label yet: fill in the column 'correct' (TRUE or FALSE, yes or "
            "no, 1 or 0, or abstained), and run the same command again. The answers are kept."
        )
    return labels


def read_sheet(path: Path, answers: Sequence[SheetAnswer], *, others: Collection[str] = ()) -> Verdicts:
    """The labels of these answers, in order; None where the cell `correct` is empty or the row is not there.

    Rows may be sorted, and columns added or moved. TRUE, yes, x and 1 mean correct; FALSE, no and 0 mean wrong;
    "abstained" means neither. Rows with a key of `others` are passed over.

    Raises:
        GradingError: a column is missing, or a row is wrong (every such row is named): another word in `correct`, a
            key twice with two labels, an unknown key, or an answer that is not the one that was graded.
    """
    _, rows = open_sheet(path)
    known = {answer.key: answer for answer in answers}
    labels: dict[str, Grade | None] = {}
    mine = [row for row in rows if _row_key(row) in known or _row_key(row) not in others]
    faults = [fault for row in mine if (fault := _take(row, known, labels))]
    if faults:
        more = f", and {len(faults) - 5} more rows" if len(faults) > 5 else ""
        raise GradingError(f"{path}: {'; '.join(faults[:5])}{more}.")
    return [labels.get(answer.key) for answer in answers]


def read_grades(path: Path) -> tuple[list[tuple[str, bool]], list[str]]:
    """The key and the grade of every row that is right or wrong, and the faults of rows with another word in `correct`.

    Raises:
        DataFileError: the file cannot be read, or is not a table.
        GradingError: it is not a sheet: a column is missing.
    """
    words = [(row, row.cells.get("correct", "").strip()) for row in open_sheet(path)[1]]
    grades = [(_row_key(row), grade) for row, word in words if isinstance(grade := _read(word), bool)]
    return grades, [_other_word(row, word) for row, word in words if word and _read(word) is None]


def _other_word(row: Row, word: str) -> str:
    return f"row {row.number} has {word!r} under correct; write TRUE or FALSE, yes or no, 1 or 0, or abstained"


def _row_key(row: Row) -> str:
    return row.cells.get("key", "").strip()


def _take(row: Row, known: Mapping[str, SheetAnswer], labels: dict[str, Grade | None]) -> str | None:
    """Put a row's label into `labels`; returns the row's fault, if any."""
    key, word = (row.cells.get(name, "").strip() for name in ("key", "correct"))
    answer = known.get(key)
    if answer is None:
        return f"row {row.number} has the key {key!r}, which this run does not"
    if "answer" in row.cells and _bare(row.cells["answer"]) != _bare(answer.text or ""):
        return f"row {row.number} holds another answer than this run gave, so its label is for that one"
    label = _read(word)
    if word and label is None:
        return _other_word(row, word)
    earlier = labels.get(key)
    if None not in (earlier, label) and earlier != label:
        return f"row {row.number} contradicts an earlier row of the same key"
    labels[key] = earlier if label is None else label
    return None


def _read(word: str) -> Grade | None:
    lower = word.lower()
    return True if lower in _YES else False if lower in _NO else ABSTAINED if lower in _ABSTAINED else None


def _bare(text: str) -> str:
    """Text as it survives a spreadsheet: apostrophes before formulas and white space may have gone, or come."""
    return "".join(text.replace("\0", _NULL).removeprefix("'").split())
