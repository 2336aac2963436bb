"""The files of a command: where questions come from, and tables.

Questions are JSON Lines, a JSON list, CSV, Excel, Parquet, a folder of these, or a dataset of the hub; each is read as
records with a place. Files may be packed (.gz, .zip). "-" is standard input: JSON Lines, or a JSON list. "pocket" are
the embedded model's own questions.

CSV is as spreadsheet programs write and read it: byte order marks, UTF-16, semicolons, a line `sep=;`, CRLF, cells with
line breaks.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

from semgrad_guard.errors import DataFileError, MissingExtraError
from semgrad_guard.files import STDIN, TwiceError, atomic_write, called, distinct, reason
from semgrad_guard.pocket import QUESTIONS_PATH
from semgrad_guard.questions.columns import tells_even_if_empty
from semgrad_guard.questions.layouts import FaultError, records_in

POCKET = "pocket"
"""The name of questions about the embedded model's world; a file of that name is ./pocket."""
HUB = "hub:"
"""Before the name of a Hugging Face dataset: hub:NAME[:CONFIG][@SPLIT]."""

PARQUET, EXCEL = ".parquet", ".xlsx"
_DATA = (PARQUET, EXCEL, ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""The data files of a folder."""
_PACKED = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"%PDF")
"""The first bytes of other zip files, of Excel's old ones, of bzip2, Zstandard and xz, and of PDF."""

_MOST_FILES = 1000
"""A folder of more data files is no data set: a disk, a home folder, a package."""
_AT_ONCE = 1024


@dataclass(frozen=True)
class Entry:
    """One record of a source, or its fault. `number` counts in the source's own `unit`, from 1.

    `is_text` tells that all of its values are texts, as in CSV.
    """

    source: str
    unit: str
    number: int
    content: Any
    is_text: bool = False

    @property
    def place(self) -> str:
        """Its place, for messages."""
        return f"{self.source}, {self.unit} {self.number}"

    def place_beside(self, other: Entry) -> str:
        """The same where `other` is named already: the file is named only if it is another one."""
        return f"{self.unit} {self.number}" if self.source == other.source else self.place


def entries(source: str) -> Iterator[Entry]:
    """The entries of a file (.csv and .tsv, .parquet, .json, or JSON Lines), of a folder of such files, of standard
    input (`-`), of a dataset (`hub:...`), or of the questions that come with the embedded model (`pocket`).

    Raises:
        DataFileError: the whole source cannot be read.
        MissingExtraError: the library for a dataset or a Parquet file is not installed.
    """
    if source.startswith(HUB):
        name, _, split = source.removeprefix(HUB).partition("@")
        name, _, config = name.partition(":")
        return _numbered(source, "row", _load(name, config or None, split or None))
    path = QUESTIONS_PATH if source == POCKET else Path(source)
    return _folder(path) if path.is_dir() else _file(path)


def _file(path: Path) -> Iterator[Entry]:
    if path.suffix.lower() == PARQUET:
        return _parquet(path)
    name, content = unpacked(path)
    suffix = Path(name).suffix.lower()
    if suffix == EXCEL:
        return _rows(path, _excel(path, content))
    if suffix in (".yaml", ".yml"):
        raise DataFileError(f"{called(path)} is YAML; give the questions as JSON, JSON Lines or CSV.")
    if content.startswith(_PACKED):
        raise DataFileError(f"{called(path)} is a workbook or compressed; give its text, as CSV (UTF-8) or JSON Lines.")
    is_text = suffix == ".txt" and not content.lstrip().startswith((b"{", b"["))  # Excel's "Unicode text"
    if is_text or suffix in (".csv", ".tsv"):
        return _rows(path, _table(path, content)[1])
    if b"\0" in content.partition(b"\n")[0]:  # in another line, it is that line's fault
        _text(path, content)
    return _json(path, content, is_lines=suffix not in (".json", "") and path != STDIN)


def _json(path: Path, content: bytes, *, is_lines: bool) -> Iterator[Entry]:
    """The entries of a JSON list, of an object that holds some, or of JSON Lines, whatever the file's name tells."""
    name = called(path)
    lines = [  # only line feeds end a line: JSON strings may hold U+2028
        (number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()
    ]
    is_list = content.lstrip().startswith(b"[")
    has_records = any(isinstance(_parsed(line, ""), dict) for _, line in lines[:2])
    if not is_list and (len(lines) != 1 if has_records else is_lines):
        return (Entry(name, "line", number, _parsed(line, f"{name}, line {number}")) for number, line in lines)
    document: Any = _parsed(content, name, span="of the file") if lines else []
    if isinstance(document, DataFileError):
        raise document
    if not isinstance(document, dict):
        return _numbered(name, "entry", cast("list[Any]", document) if is_list else [document])
    try:
        records = records_in(cast("dict[str, Any]", document))
    except FaultError as error:
        raise DataFileError(f"{name} is one JSON object, {error}.") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise DataFileError(f"{name} is one JSON object, and no layout of questions that is known.") from error
    return _numbered(name, "JSON object" if records == [document] else "entry", records)


def _folder(folder: Path) -> Iterator[Entry]:
    """The entries of its data files, in the order of their paths; a folder `kind=history` is a field of its entries."""
    below = ((path, path.relative_to(folder).parts) for path in folder.rglob("*") if path.suffix.lower() in _DATA)
    visible = (
        (path, folders)
        for path, (*folders, name) in below
        if not any(part.startswith((".", "_")) for part in (*folders, name)) and path.is_file()
    )
    try:
        found = sorted(itertools.islice(visible, _MOST_FILES + 1))
    except OSError as error:
        raise DataFileError(f"Cannot read the folder {folder}: {reason(error)}. Is the path right?") from error
    if not found:
        raise DataFileError(f"{folder} is a folder without a data file ({', '.join(_DATA)}). Is the path right?")
    if len(found) > _MOST_FILES:
        raise DataFileError(
            f"{folder} holds more than {_MOST_FILES:,} data files; name the one with the questions, or its folder."
        )
    for path, folders in found:
        fields = dict(part.split("=", 1) for part in folders if "=" in part)
        for entry in _file(path):
            record: Any = entry.content
            if isinstance(record, dict):  # its own fields take precedence over those of its folders
                record = {**fields, **cast("dict[str, Any]", record)}
            yield replace(entry, content=record)


def _parquet(path: Path) -> Iterator[Entry]:
    """Rows by column name, some at a time: the file may be larger than memory."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyarrow", extra="parquet") from error
    number = itertools.count(1)
    try:
        with parquet.ParquetFile(path) as file:
            _require_distinct(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_AT_ONCE):
                for record in batch.to_pylist():
                    yield Entry(str(path), "row", next(number), record)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataFileError(f"Cannot read {path}: {reason(error)}. Is it a Parquet file?") from error


def _numbered(source: str, unit: str, records: Iterable[Any]) -> Iterator[Entry]:
    return (Entry(source, unit, number, record) for number, record in enumerate(records, start=1))


def _parsed(text: bytes, place: str, *, span: str = "of the line") -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        return DataFileError(f"{place} is not UTF-8 text (byte {error.start + 1} {span}).")
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        return DataFileError(f"{place} is not valid JSON: {error.msg} at {where}.")
    except TwiceError as error:
        return DataFileError(f"{place} has {error.name} twice; keep one.")
    except RecursionError:
        return DataFileError(f"{place} is nested too deeply.")
    except ValueError:  # the rest: Python does not read integers of more than 4,300 digits
        return DataFileError(f"{place} holds a number that is too long to read; put it in quotes or leave it out.")


def _rows(path: Path, rows: Iterable[Row]) -> Iterator[Entry]:
    """Rows by column name, without empty cells that tell nothing."""
    for row in rows:
        cells = {name: cell for name, cell in row.cells.items() if cell.strip() or tells_even_if_empty(name)}
        entry = Entry(str(path), "row", row.number, cells, is_text=True)
        yield entry if row.fault is None else replace(entry, content=DataFileError(f"{entry.place} {row.fault}."))


def _excel(path: Path, content: bytes) -> list[Row]:
    """The rows of the one sheet of a workbook that holds any."""
    try:
        openpyxl = import_module("openpyxl")
    except ModuleNotFoundError as error:
        raise MissingExtraError("openpyxl", extra="excel") from error
    try:
        sheets = openpyxl.load_workbook(io.BytesIO(content), data_only=True).worksheets
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OSError, SyntaxError, BadZipFile) as error:
        raise DataFileError(f"Cannot read {path}: {reason(error)}. Is it an Excel workbook (.xlsx)?") from error
    filled = [sheet for sheet in sheets if any(any(row) for row in sheet.iter_rows(values_only=True))]
    if len(filled) > 1:
        names = ", ".join(sheet.title for sheet in filled)
        raise DataFileError(f"{path} has the sheets {names}; save the one with the questions as CSV.")
    texts = [(cells[0].row, [*map(_cell, cells)]) for sheet in filled for cells in sheet.iter_rows()]
    hidden = {number for sheet in filled for number, form in sheet.row_dimensions.items() if form.hidden}
    rows = _by_column(path, [row for row in texts if any(row[1])])[1]
    return [replace(row, fault="is hidden: show it, or delete it") if row.number in hidden else row for row in rows]


def _cell(cell: Any) -> str:
    """A cell's value as Excel shows it; a date or a time as Python does, by which it is known."""
    value, form = cell.value, cell.number_format
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).upper()
    if not isinstance(value, int | float):
        return value.replace("_x000D_", "") if isinstance(value, str) else repr(value)
    if form.endswith("%"):
        return f"{value * 100:.12g}%"
    if re.fullmatch("00+", form):
        return f"{value:0{len(form)}.0f}"
    return str(int(value)) if value == int(value) else str(value)


def _load(name: str, config: str | None, split: str | None) -> Iterable[Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("datasets", extra="datasets") from error
    library: Any = datasets
    saved = any((Path(name) / marker).is_file() for marker in ("dataset_info.json", "dataset_dict.json"))
    try:
        found: Any = library.load_from_disk(name) if saved else library.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataFileError(
            f"Cannot load the dataset {name!r}: {reason(error)}. Name it as {HUB}NAME[:CONFIG][@SPLIT], and check "
            "that the hub can be reached."
        ) from error
    if not isinstance(found, dict):
        return found
    splits = cast("dict[str, Iterable[Any]]", found)
    if (not saved or split is None) and len(splits) == 1:
        return next(iter(splits.values()))
    if not saved or split not in splits:
        raise DataFileError(f"The dataset {name!r} has the splits {', '.join(splits)}; choose one: {HUB}{name}@SPLIT.")
    return splits[split]


_GZIP = b"\x1f\x8b"


def unpacked(path: Path) -> tuple[str, bytes]:
    """The name and the bytes of a file of data, or of standard input for `-`.

    UTF-16 is made UTF-8, without a byte order mark. A `.gz`, or the one file in a `.zip`, is named as it was before.

    Raises:
        DataFileError: it cannot be read, is a device, which never ends, is not whole, holds several files, or is UTF-16
            that breaks off.
    """
    try:
        mode = 0 if path == STDIN else path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise DataFileError(f"Cannot read {path}: it is a device. Give a file, or - to read standard input.")
        name, content = path.name, sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataFileError(f"Cannot read {called(path)}: {reason(error)}. Is the path right?") from error
    try:
        if content.startswith(_GZIP):
            name, content = (path.stem if path.suffix.lower() == ".gz" else name), gzip.decompress(content)
        elif path.suffix.lower() == ".zip":
            with zipfile.ZipFile(io.BytesIO(content)) as packed:
                held = [one for one in packed.namelist() if not one.endswith("/") and "__MACOSX" not in one]
                if len(held) != 1:
                    raise DataFileError(
                        f"{called(path)} holds {len(held)} files; unpack it and give one, or the folder."
                    )
                name, content = held[0], packed.read(held[0])
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise DataFileError(f"Cannot unpack {called(path)}: {reason(error)}. Is it whole?") from error
    if (encoding := _encoding(content)) == "utf-8":
        return name, content.removeprefix(codecs.BOM_UTF8)
    try:
        return name, content[2:].decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise DataFileError(
            f"{called(path)} is UTF-16 text with a fault (byte {error.start + 3}); save it as UTF-8."
        ) from error


def _encoding(content: bytes) -> str:
    """The encoding that the byte order mark tells; UTF-8 without one."""
    marks = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
    return marks.get(content[:2], "utf-8")


def read_text(path: Path) -> str:
    """The text of a file of data, or of standard input for `-`, without a byte order mark.

    Raises:
        DataFileError: it cannot be read, or is neither UTF-8 nor UTF-16.
    """
    return _text(path, unpacked(path)[1])


def _text(path: Path, content: bytes, *, save_as: str = "UTF-8") -> str:
    """The text of bytes; `save_as` is the name of the right encoding in a program that saves such files."""
    if b"\0" in content:
        raise DataFileError(
            f"{called(path)} holds null bytes, so it is not text, or it is UTF-16 without a byte order mark; save it "
            f'as "{save_as}".'
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataFileError(
            f'{called(path)} is not UTF-8 text (byte {error.start + 1}); save it as "{save_as}".'
        ) from error


_DELIMITERS = ",;\t|"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Row:
    """One row by column name (lower case). `number` is the spreadsheet's own: the header is row 1.

    `fault` completes the place of a row that is not to be read.
    """

    number: int
    cells: dict[str, str]
    fault: str | None = None


def read_table(path: Path) -> tuple[list[str], list[Row]]:
    """(column names, rows that are not blank) of a CSV file; a row with cells beyond the last column has a fault.

    Raises:
        DataFileError: the file cannot be read, is not UTF-8, its quotes do not match, or two columns have one name.
    """
    return _table(path, unpacked(path)[1])


def _table(path: Path, content: bytes) -> tuple[list[str], list[Row]]:
    text = _text(path, content, save_as="CSV UTF-8")
    delimiter, first = _delimiter(text)
    try:
        rows = [*csv.reader(io.StringIO(text[first:], newline=""), delimiter=delimiter, strict=True)]
    except csv.Error as error:
        raise DataFileError(f"{called(path)} is not a CSV file: {error}. Is every quotation mark closed?") from error
    return _by_column(path, [*enumerate(rows, start=2 if first else 1)])


def _by_column(path: Path, rows: Sequence[tuple[int, Sequence[str]]]) -> tuple[list[str], list[Row]]:
    """(column names, rows that are not blank) of a table's numbered rows, the header first."""
    if not rows:
        raise DataFileError(f"{called(path)} is empty: its first row names the columns.")
    names = [name.strip().lower() for name in rows[0][1]]
    _require_distinct(path, names)
    surplus = "has more cells than there are columns; quote texts that hold commas"
    return names, [
        Row(number, dict(zip(names, row, strict=False)), surplus if any(map(str.strip, row[len(names) :])) else None)
        for number, row in rows[1:]
        if any(map(str.strip, row))
    ]


def _require_distinct(path: Path, names: Sequence[str]) -> None:
    plain = [name.lower() for name in names if name]
    if twice := [name for name in plain if plain.count(name) > 1]:
        raise DataFileError(f"{called(path)} has the column {twice[0]!r} twice, in any case of letters; keep one.")


def _delimiter(text: str) -> tuple[str, int]:
    """The separator of the columns, and where the header begins: that of Excel's line `sep=;` before it, else the sign
    that makes most columns of the first line.
    """
    if marked := re.match(r'"?sep=(.)"?\r?\n', text, re.IGNORECASE):
        return marked[1], marked.end()
    first = next(io.StringIO(text, newline=""), "")
    rows = {sign: csv.reader([first], delimiter=sign) for sign in _DELIMITERS}
    return max(_DELIMITERS, key=lambda sign: sum(map(len, rows[sign]))), 0


def harmless(cell: str) -> str:
    """Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file that spreadsheet programs open as it is meant: marked as UTF-8, and no text is a formula."""
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    writer.writerow(header)
    writer.writerows([harmless(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return atomic_write(path, codecs.BOM_UTF8 + written.getvalue().encode())


def append_rows(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Add rows to a CSV file in its own form; all that is in it stays, byte by byte. It is written next to it, and
    renamed.

    The rows' cells are in the order of the file's columns, as `read_table` names them.
    """
    if not rows:
        return path
    content = path.read_bytes()
    encoding = _encoding(content)
    text = content.decode(encoding).removeprefix("\ufeff")
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=_delimiter(text)[0]).writerows([harmless(cell) for cell in row] for row in rows)
    end = "" if text.endswith(("\n", "\r")) else "\r\n"
    return atomic_write(path, content + (end + written.getvalue()).encode(encoding))
