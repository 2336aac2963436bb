"""Where a program of this user keeps things: what it can fetch again, and what it has seen.

| | Linux and others | macOS | Windows |
| --- | --- | --- | --- |
| cache | `$XDG_CACHE_HOME`, `~/.cache` | `~/Library/Caches` | `%LOCALAPPDATA%` |
| state | `$XDG_STATE_HOME`, `~/.local/state` | `~/Library/Application Support` | `%LOCALAPPDATA%` |
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from semgrad_guard.errors import InputError

NAME = "semgrad-guard"


def cache_folder(*, otherwise: str) -> Path:
    """For what can be fetched again.

    Raises:
        InputError: there is no home folder; the message ends with `otherwise`, what to do then.
    """
    return _folder("XDG_CACHE_HOME", (".cache",), ("Library", "Caches"), otherwise)


def state_folder(*, otherwise: str) -> Path:
    """For what was seen, and is nowhere else.

    Raises:
        InputError: there is no home folder; the message ends with `otherwise`, what to do then.
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
