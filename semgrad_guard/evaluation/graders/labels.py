"""A sheet for people who grade: written for a spreadsheet program, and read back as it saves it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semgrad_guard.errors import GradingError
from semgrad_guard.evaluation.files import STDIN, Row, append_rows, read_table, write_table

COLUMNS = ("key", "question", "references", "answer", "correct")
_NULL = "\N{REPLACEMENT CHARACTER}"
"""In place of a null byte, which no table can hold; models write anything."""

NAME = "human"
"""The name of people among the graders."""

# Spreadsheet programs write TRUE and FALSE in the language of their user.
_YES = {"1", "1.0", "true", "yes", "y", "x", "correct", "right", "wahr", "vrai", "verdadero"}
_NO = {"0", "0.0", "false", "no", "n", "incorrect", "wrong", "falsch", "faux", "falso"}


class Labelled(Protocol):
    """An answer that a person can grade; `text` is None where there is none."""

    @property
    def key(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def references(self) -> tuple[str, ...]: ...
    @property
    def text(self) -> str | None: ...


@dataclass(frozen=True)
class SheetAnswer:
    """An answer with the cells of its row; of a sentence of one, `passage` is that of the question, "" without one."""

    key: str
    question: str
    references: tuple[str, ...]
    text: str | None
    passage: str | None = None


def write_sheet(path: Path, answers: Sequence[Labelled]) -> Path:
    """Write the sheet: one row per answered question, references one a line, the column `correct` empty."""
    return write_table(path, COLUMNS, [_cells(answer) for answer in answers if answer.text is not None])


def extend_sheet(path: Path, answers: Sequence[Labelled]) -> int:
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
    there = {_key(row) for row in rows}
    missing = [answer for answer in answered if answer.key not in there]
    new: list[dict[str, str]] = [dict(zip(COLUMNS, _cells(answer), strict=True)) for answer in missing]
    append_rows(path, [[cells.get(name, "") for name in names] for cells in new])
    return len(new)


def open_sheet(path: Path) -> tuple[list[str], list[Row]]:
    """(column names, rows) of a sheet.

    Raises:
        DataFileError: the file cannot be read, or is not a table.
        GradingError: it is not a sheet: a column is missing.
    """
    names, rows = read_table(path)
    if missing := [name for name in ("key", "correct") if name not in names]:
        raise GradingError(f"{path} has no column {missing[0]!r}; keep those of the sheet: {', '.join(COLUMNS)}.")
    return names, rows


def labels_for(path: Path, answers: Sequence[Labelled], *, others: Collection[str] = ()) -> list[bool | None]:
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
            "no, 1 or 0), and run the same command again. The answers are kept."
        )
    return labels


def _cells(answer: Labelled) -> tuple[str, str, str, str, str]:
    texts = (answer.question, "\n".join(answer.references), answer.text or "")
    question, references, text = (cell.replace("\0", _NULL) for cell in texts)
    return answer.key, question, references, text, ""


def read_sheet(path: Path, answers: Sequence[Labelled], *, others: Collection[str] = ()) -> list[bool | None]:
    """The labels of these answers, in order; None where the cell `correct` is empty or the row is not there.

    Rows may be sorted, and columns added or moved. TRUE, yes, x and 1 mean correct; FALSE, no and 0 mean wrong. Rows
    with a key of `others` are passed over.

    Raises:
        GradingError: a column is missing, or a row is wrong (every such row is named): another word in `correct`, a
            key twice with two labels, an unknown key, or an answer that is not the one that was graded.
    """
    _, rows = open_sheet(path)
    known = {answer.key: answer for answer in answers}
    labels: dict[str, bool | None] = {}
    mine = [row for row in rows if _key(row) in known or _key(row) not in others]
    faults = [fault for row in mine if (fault := _take(row, known, labels))]
    if faults:
        more = f", and {len(faults) - 5} more rows" if len(faults) > 5 else ""
        raise GradingError(f"{path}: {'; '.join(faults[:5])}{more}.")
    return [labels.get(answer.key) for answer in answers]


def read_grades(path: Path) -> tuple[list[tuple[str, bool]], list[str]]:
    """The key and the grade of every row that has one, and the faults of rows with another word in `correct`.

    Raises:
        DataFileError: the file cannot be read, or is not a table.
        GradingError: it is not a sheet: a column is missing.
    """
    words = [(row, row.cells["correct"].strip()) for row in open_sheet(path)[1]]
    grades = [(_key(row), grade) for row, word in words if (grade := _read(word)) is not None]
    return grades, [_other_word(row, word) for row, word in words if word and _read(word) is None]


def _other_word(row: Row, word: str) -> str:
    return f"row {row.number} has {word!r} under correct; write TRUE or FALSE, yes or no, 1 or 0"


def _key(row: Row) -> str:
    return row.cells.get("key", "").strip()


def _take(row: Row, known: Mapping[str, Labelled], labels: dict[str, bool | None]) -> str | None:
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
    if None not in (earlier, label) and earlier is not label:
        return f"row {row.number} contradicts an earlier row of the same key"
    labels[key] = earlier if label is None else label
    return None


def _read(word: str) -> bool | None:
    lower = word.lower()
    return True if lower in _YES else False if lower in _NO else None


def _bare(text: str) -> str:
    """Text as it survives a spreadsheet: apostrophes before formulas and white space may have gone, or come."""
    return "".join(text.replace("\0", _NULL).removeprefix("'").split())
