"""A sheet for people who grade: written for a spreadsheet program, and read back as it saves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from semgrad_guard.errors import GradingError
from semgrad_guard.evaluation.questions.spreadsheet import Row, read_table, write_table
from semgrad_guard.evaluation.runs.evaluated import EvaluatedAnswer

COLUMNS = ("key", "question", "references", "answer", "correct")
NAME = "human"
"""What people are called among the graders."""

# Spreadsheet programs write TRUE and FALSE in the language of their user.
_YES = {"1", "1.0", "true", "yes", "y", "x", "correct", "right", "wahr", "vrai", "verdadero"}
_NO = {"0", "0.0", "false", "no", "n", "incorrect", "wrong", "falsch", "faux", "falso"}


def write_sheet(path: Path, answers: Sequence[EvaluatedAnswer]) -> Path:
    """Write the sheet: one row per answered question, references one a line, the column `correct` empty."""
    rows = [
        (answer.key, answer.question, "\n".join(answer.references), answer.text, "")
        for answer in answers
        if answer.text is not None
    ]
    return write_table(path, COLUMNS, rows)


def read_sheet(path: Path, answers: Sequence[EvaluatedAnswer]) -> list[bool | None]:
    """The labels of these answers, in order; None where the cell `correct` is empty or the row is not there.

    Rows may be sorted, and columns added or moved. TRUE, yes, x and 1 mean correct; FALSE, no and 0 mean wrong.

    Raises:
        GradingError: a column is missing, or a row is wrong (every such row is named): another word in `correct`, a
            key twice with two labels, an unknown key, or an answer that is not the one that was graded.
    """
    names, rows = read_table(path)
    if missing := [name for name in ("key", "correct") if name not in names]:
        raise GradingError(f"{path} has no column {missing[0]!r}; keep those of the sheet: {', '.join(COLUMNS)}.")
    known = {answer.key: answer for answer in answers}
    labels: dict[str, bool | None] = {}
    faults = [fault for row in rows if (fault := _take(row, known, labels))]
    if faults:
        more = f", and {len(faults) - 5} more rows" if len(faults) > 5 else ""
        raise GradingError(f"{path}: {'; '.join(faults[:5])}{more}.")
    return [labels.get(answer.key) for answer in answers]


def _take(row: Row, known: Mapping[str, EvaluatedAnswer], labels: dict[str, bool | None]) -> str | None:
    """Put a row's label into `labels`; what is wrong with the row, if anything."""
    key, word = (row.cells.get(name, "").strip() for name in ("key", "correct"))
    answer = known.get(key)
    if answer is None:
        return f"row {row.number} has the key {key!r}, which this run does not"
    if "answer" in row.cells and _bare(row.cells["answer"]) != _bare(answer.text or ""):
        return f"row {row.number} holds another answer than this run gave, so its label is for that one"
    label = _read(word)
    if word and label is None:
        return f"row {row.number} has {word!r} under correct; write TRUE or FALSE, yes or no, 1 or 0"
    earlier = labels.get(key)
    if None not in (earlier, label) and earlier is not label:
        return f"row {row.number} contradicts an earlier row of the same key"
    labels[key] = earlier if label is None else label
    return None


def _read(word: str) -> bool | None:
    lower = word.lower()
    return True if lower in _YES else False if lower in _NO else None


def _bare(text: str) -> str:
    """Text as it survives a spreadsheet: apostrophes before formulas and white space may have gone, or come."""
    return "".join(text.removeprefix("'").split())
