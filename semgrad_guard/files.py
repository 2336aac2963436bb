"""Files: written whole or not at all, where only a regular file can be, readable for their owner; outputs that are
refused before any work; JSON without names that occur twice; tables of the package; and a user's folders.

| | Linux and others | macOS | Windows |
| --- | --- | --- | --- |
| cache | `$XDG_CACHE_HOME`, `~/.cache` | `~/Library/Caches` | `%LOCALAPPDATA%` |
| state | `$XDG_STATE_HOME`, `~/.local/state` | `~/Library/Application Support` | `%LOCALAPPDATA%` |
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from semgrad_guard.errors import InputError

STDIN = Path("-")
"""Standard input, as the path of a file of data."""


def atomic_write(path: Path, content: str | bytes | Callable[[Path], object], *, private: bool = False) -> Path:
    """Write a file next to its place, bring it onto the disk, then rename it: an interrupted write leaves no half file.

    Args:
        path: an existing file is replaced. A symbolic link keeps pointing where it does, and its target is
            written.
        content: text (written as UTF-8), bytes, or a function that makes the file at the path it is given.
        private: it holds answers that a program keeps for itself: only its owner can read it.

    Raises:
        InputError: nothing can be written there, or the present one is not a regular file.
    """
    try:
        require_regular(path)
        target = path.resolve()
        beside = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
        try:
            if private:
                make_private(beside)
            if isinstance(content, str | bytes):
                beside.write_bytes(content.encode() if isinstance(content, str) else content)
            else:
                content(beside)
            with beside.open("rb+") as written:
                os.fsync(written.fileno())
            beside.replace(target)
        finally:
            with suppress(OSError):  # there is none where its folder is none
                beside.unlink(missing_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # Python 3.11 calls links that go round a RuntimeError
        raise cannot_write(path, error) from error
    return path


def table_of(package: str, name: str) -> dict[str, Any]:
    """A TOML file that a package brings with it."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def make_private(path: Path) -> None:
    """Leave a file that holds answers to its owner alone; one that is not there is made, empty.

    It is made with these rights, so that no other user can have opened it before. Those of a file that is there are
    taken back from all others. Windows has no such rights: there, the folder decides.

    A file that is there is never opened: closing it would drop the locks that this process has on it, and SQLite's
    write-ahead log would be lost with them (https://sqlite.org/howtocorrupt.html).

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    with suppress(FileExistsError):
        os.close(os.open(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    take_back(path)


def take_back(path: Path) -> None:
    """Leave a regular file or a folder to its owner alone. Devices stay as they are.

    Raises:
        OSError: there is nothing, or it belongs to another user.
    """
    mode = path.stat().st_mode
    ours = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if os.name == "posix" and ours and mode & 0o077:
        path.chmod(stat.S_IMODE(mode) & 0o700)


def require_regular(path: Path) -> None:
    """Refuse anything but a regular file: renaming over a device would replace it, a pipe waits for a reader.

    Raises:
        InputError: it names no file, or something other than a file; the message names it.
    """
    if not path.exists():
        if not path.name:
            raise InputError(f"Cannot write {str(path)!r}: it names no file. Choose a path in an existing folder.")
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"Cannot write {path}: it is {kind}. Choose a path in an existing folder, for a file.")


def cannot_write(path: Path, error: Exception) -> InputError:
    """The error for a path at which writing fails."""
    return InputError(
        f"Cannot write {path}: {reason(error)}. Choose a path in an existing folder that you may write to."
    )


class TwiceError(ValueError):
    """An object of JSON has a name twice: of its two values a reader sees only one. `name` is written as in JSON."""

    def __init__(self, name: str) -> None:
        self.name = json.dumps(name, ensure_ascii=False)
        super().__init__(f"it has {self.name} twice")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names are all different (the `object_pairs_hook` of `json.loads`).

    Raises:
        TwiceError: two are alike.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def reason(error: Exception) -> str:
    """Why, without a full stop: the system's own words, or the first line of its text, or the name of its type."""
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().partition("\n")[0].rstrip(".") or type(error).__name__


NAME = "semgrad-guard"


def cache_folder(*, otherwise: str) -> Path:
    """For files that can be fetched again.

    Raises:
        InputError: there is no home folder; the message ends with `otherwise`, the advice.
    """
    return _folder("XDG_CACHE_HOME", (".cache",), ("Library", "Caches"), otherwise)


def state_folder(*, otherwise: str) -> Path:
    """For records that exist nowhere else.

    Raises:
        InputError: there is no home folder; the message ends with `otherwise`, the advice.
    """
    return _folder("XDG_STATE_HOME", (".local", "state"), ("Library", "Application Support"), otherwise)


def _folder(variable: str, plain: tuple[str, ...], mac: tuple[str, ...], otherwise: str) -> Path:
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home().joinpath(*mac)
        else:
            base = Path(os.environ.get(variable, ""))
            base = base if base.is_absolute() else Path.home().joinpath(*plain)  # a relative one counts for nothing
    except RuntimeError as error:
        raise InputError(f"There is no home folder ({error}). {otherwise}") from error
    return base / NAME


def called(path: Path) -> str:
    """The name of an input in messages."""
    return "stdin" if path == STDIN else str(path)


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
