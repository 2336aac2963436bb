"""A command's files: inputs that stay as they are, outputs that are refused before any work and never half-written.

CSV is as spreadsheet programs write and read it: byte order marks, UTF-16, semicolons, a line `sep=;`, CRLF, cells with
line breaks.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import os
import re
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from semgrad_guard.errors import DataFileError, InputError
from semgrad_guard.files import atomic_write, cannot_write, reason, require_regular

_GZIP = b"\x1f\x8b"
STDIN = Path("-")
"""Standard input, as the path of a file of data."""


def called(path: Path) -> str:
    """The name of an input in messages."""
    return "stdin" if path == STDIN else str(path)


def unpacked(path: Path) -> tuple[str, bytes]:
    """The name and the bytes of a file of data, or of standard input for `-`.

    UTF-16 is made UTF-8, without a byte order mark. A `.gz`, or the one file in a `.zip`, is named as it was before.

    Raises:
        DataFileError: it cannot be read, is a device, which never ends, is not whole, holds several files, or is UTF-16
            that breaks off.
    """
    name, content = path.name, _content(path)
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


def _content(path: Path) -> bytes:
    try:
        if path == STDIN:
            return sys.stdin.buffer.read()
        if stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode):
            raise DataFileError(f"Cannot read {path}: it is a device. Give a file, or - to read standard input.")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataFileError(f"Cannot read {called(path)}: {reason(error)}. Is the path right?") from error


def read_text(path: Path, *, save_as: str = "UTF-8") -> str:
    """The text of a file of data, or of standard input for `-`, without a byte order mark.

    `save_as` is the name of the right encoding in a program that saves such files.

    Raises:
        DataFileError: it cannot be read, or is neither UTF-8 nor UTF-16.
    """
    _, content = unpacked(path)
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


def require_writable(path: Path, *, inputs: Iterable[Path] = ()) -> None:
    """Raise, before any work, unless a regular file can be written at `path`. It tries: permission bits do not tell.

    Args:
        path: where the file is to be.
        inputs: files that the command reads. None of them is overwritten, however it is spelled; of a folder (a model),
            none of its files.

    Raises:
        InputError: the path is not that of a regular file, is an input's, or cannot be written.
    """
    try:
        require_regular(path)
        for given in inputs if path.exists() else ():
            if any(os.path.samestat(path.stat(), theirs) for theirs in _stats(given)):
                what = f"{called(given)} is read" if not given.is_dir() else f"it is a file of {given}, which is read"
                raise InputError(
                    f"Writing {path} would overwrite an input of this command ({what}). Choose another path."
                )
        with tempfile.TemporaryFile(dir=path.resolve().parent):  # where a symbolic link points to
            pass
        if path.exists():
            path.open("ab").close()
    except (OSError, ValueError, RuntimeError) as error:  # Python 3.11 calls links that go round a RuntimeError
        raise cannot_write(path, error) from error


def first_line(path: Path) -> bytes:
    """The first line of a file without its end, and not more of it than 64 KiB."""
    with path.open("rb") as file:
        return file.readline(1 << 16).removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")


def beside(output: Path, suffix: str) -> Path:
    """The path of a file that belongs to an output: its name with another suffix.

    Raises:
        InputError: the path names no file.
    """
    try:
        return output.with_suffix(suffix)
    except ValueError:
        raise InputError(f"{str(output)!r} names no file. Choose a path like {Path('folder') / 'name.json'}.") from None


def make_folder(folder: Path) -> bool:
    """Make a folder for outputs; whether it was not there.

    Raises:
        InputError: there can be none.
    """
    was_there = folder.is_dir()
    try:
        if not was_there and folder.exists():
            raise InputError(f"Cannot make the folder {folder}: it is a file. Choose another.")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot make the folder {folder}: {reason(error)}. Choose another.") from error
    return not was_there


@contextmanager
def sole_writer(path: Path) -> Generator[None]:
    """Hold `path` against every other run that would write it; a killed run holds nothing.

    The lock is a file of its own, next to `path` and gone at the end.

    Raises:
        InputError: another run is writing there at this moment, or nothing can be written there.
    """
    target = path.resolve()
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        if not target.parent.is_dir():  # the lock would make it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(
            f"Another run is writing {path} at this moment. Wait until it has ended, or choose another path."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; a lock file that stays does no harm
            os.unlink(lock.lock_file)
        lock.release()


def _stats(given: Path) -> list[os.stat_result]:
    """The status of an input's files; none without such an input."""
    try:
        if given == STDIN:
            return [os.fstat(sys.stdin.fileno())]
        if given.is_dir():
            return [entry.stat() for entry in given.iterdir() if entry.is_file()]
        return [given.stat()]
    except (OSError, ValueError):  # the error comes when it is read
        return []


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
    delimiter, first = _delimiter(text)
    try:
        rows = [*csv.reader(io.StringIO(text[first:], newline=""), delimiter=delimiter, strict=True)]
    except csv.Error as error:
        raise DataFileError(f"{called(path)} is not a CSV file: {error}. Is every quotation mark closed?") from error
    return rows_of(path, [*enumerate(rows, start=2 if first else 1)])


def rows_of(path: Path, rows: Sequence[tuple[int, Sequence[str]]]) -> tuple[list[str], list[Row]]:
    """(column names, rows that are not blank) of a table's numbered rows, the header first."""
    if not rows:
        raise DataFileError(f"{called(path)} is empty: its first row names the columns.")
    names = [name.strip().lower() for name in rows[0][1]]
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataFileError(f"{called(path)} has the column {twice[0]!r} twice, in any case of letters; keep one.")
    return names, [
        Row(number, dict(zip(names, row, strict=False)), surplus=max(0, len(row) - len(names)))
        for number, row in rows[1:]
        if any(map(str.strip, row))
    ]


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


def _delimiter(text: str) -> tuple[str, int]:
    """The separator of the columns, and where the header begins: that of Excel's line `sep=;` before it, else the sign
    that makes most columns of the first line.
    """
    if marked := re.match(r'"?sep=(.)"?\r?\n', text, re.IGNORECASE):
        return marked[1], marked.end()
    first = text.partition("\n")[0]
    rows = {sign: csv.reader([first], delimiter=sign) for sign in _DELIMITERS}
    return max(_DELIMITERS, key=lambda sign: sum(map(len, rows[sign]))), 0


def harmless(cell: str) -> str:
    """Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell
