"""CSV as spreadsheet programs write and read it: byte order marks, semicolons, CRLF, cells with line breaks."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from semgrad_guard.errors import DataFileError
from semgrad_guard.evaluation.files import called, read_text
from semgrad_guard.files import atomic_write

_DELIMITERS = ",;\t"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Row:
    """One row by column name (lower case). `number` is the spreadsheet's own: the header is row 1."""

    number: int
    cells: dict[str, str]
    surplus: int = 0


def read_table(path: Path) -> tuple[list[str], list[Row]]:
    """(column names, rows that are not blank) of a CSV file; `surplus` counts cells beyond the last column.

    Raises:
        DataFileError: the file cannot be read, is not UTF-8, its quotes do not match, or two columns have one name.
    """
    text = read_text(path, save_as="CSV UTF-8")
    delimiter = _delimiter(text.partition("\n")[0])
    try:
        header, *rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    except ValueError:
        raise DataFileError(f"{called(path)} is empty: its first row names the columns.") from None
    except csv.Error as error:
        raise DataFileError(f"{called(path)} is not a CSV file: {error}. Is every quotation mark closed?") from error
    names = [name.strip().lower() for name in header]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataFileError(f"{called(path)} has the column {twice[0]!r} twice, in any case of letters; keep one.")
    return names, list(_filled(names, rows))


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file that spreadsheet programs open as it is meant: marked as UTF-8, and no text is a formula."""
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    writer.writerow(header)
    writer.writerows([_harmless(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return atomic_write(path, codecs.BOM_UTF8 + written.getvalue().encode())


def append_rows(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Add rows to a CSV file in its own form; all that is in it stays, byte by byte. It is written next to it, and
    renamed.

    The rows' cells are in the order of the file's columns, as `read_table` names them.
    """
    if not rows:
        return path
    content = path.read_bytes()
    delimiter = _delimiter(content.removeprefix(codecs.BOM_UTF8).decode("utf-8").partition("\n")[0])
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter).writerows([_harmless(cell) for cell in row] for row in rows)
    end = b"" if content.endswith((b"\n", b"\r")) else b"\r\n"
    return atomic_write(path, content + end + written.getvalue().encode())


def _delimiter(first: str) -> str:
    """The separator of the columns: the sign that makes most of them in the first line."""
    return max(_DELIMITERS, key=lambda candidate: sum(len(row) for row in csv.reader([first], delimiter=candidate)))


def _harmless(cell: str) -> str:
    """Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def _filled(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=2):
        if any(cell.strip() for cell in row):
            cells = dict(zip(names, row, strict=False))
            yield Row(number, cells, surplus=max(0, len(row) - len(names)))
