"""Where questions come from: JSON Lines, a JSON list, CSV, Excel, Parquet, a folder of these, or a dataset of the hub;
each as records with a place. Files may be packed (.gz, .zip).

"-" is standard input: JSON Lines, or a JSON list. "pocket" are the embedded model's own questions.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

from semgrad_guard.errors import DataFileError, MissingExtraError
from semgrad_guard.files import TwiceError, distinct, reason
from semgrad_guard.pocket import QUESTIONS_PATH
from semgrad_guard.questions.columns import tells_even_if_empty
from semgrad_guard.questions.data_files import STDIN, Row, called, read_table, rows_of, unpacked
from semgrad_guard.questions.layouts import FaultError, records_in

POCKET = "pocket"
"""The name of questions about the embedded model's world; a file of that name is ./pocket."""
HUB = "hub:"
"""Before the name of a Hugging Face dataset: hub:NAME[:CONFIG][@SPLIT]."""

PARQUET, EXCEL = ".parquet", ".xlsx"
_DATA = (PARQUET, EXCEL, ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""The data files of a folder."""
_PACKED = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ")
"""The first bytes of other zip files, of Excel's old ones, and of bzip2, Zstandard and xz."""

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
        return _rows(path, read_table(path)[1])
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
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _DATA and path.is_file()]
    parts = {path: path.relative_to(folder).parts for path in found}
    visible = [path for path in found if not any(part.startswith((".", "_")) for part in parts[path])]
    if not visible:
        raise DataFileError(f"{folder} is a folder without a data file ({', '.join(_DATA)}). Is the path right?")
    for path in visible:
        fields = dict(part.split("=", 1) for part in parts[path][:-1] if "=" in part)
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
        if row.surplus:
            fault = DataFileError(f"{entry.place} has more cells than there are columns; quote texts that hold commas.")
            entry = replace(entry, content=fault)
        yield entry


def _excel(path: Path, content: bytes) -> list[Row]:
    """The rows of the one sheet of a workbook that holds any."""
    try:
        openpyxl = import_module("openpyxl")
    except ModuleNotFoundError as error:
        raise MissingExtraError("openpyxl", extra="excel") from error
    try:
        book: Any = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
        sheets = {sheet.title: [*sheet.iter_rows(values_only=True)] for sheet in book.worksheets}
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        raise DataFileError(f"Cannot read {path}: {reason(error)}. Is it an Excel workbook (.xlsx)?") from error
    filled = {title: rows for title, rows in sheets.items() if any(any(row) for row in rows)}
    if len(filled) > 1:
        raise DataFileError(f"{path} has the sheets {', '.join(filled)}; save the one with the questions as CSV.")
    texts = [[_cell(value) for value in row] for rows in filled.values() for row in rows]
    return rows_of(path, [(number, row) for number, row in enumerate(texts, start=1)])[1]


def _cell(value: Any) -> str:
    """A cell's value as Excel would save it; a date has its time, by which it is known."""
    if isinstance(value, bool):
        return str(value).upper()
    return "" if value is None else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


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
