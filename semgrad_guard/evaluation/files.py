"""Output files: refused before any work if they cannot be written, and never left half-written."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from semgrad_guard.errors import InputError


def require_writable(path: Path) -> None:
    """Raise, before any work, unless a file can be written at `path`. It tries: permission bits do not tell."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_beside(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` make a file beside `path`, then rename it: an interrupted write leaves nothing behind."""
    beside = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        write(beside)
        beside.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(
        f"Cannot write {path}: {error.strerror or error}. Choose a path in an existing folder that you may write to."
    )
