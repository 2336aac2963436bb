"""Where a decision log is, and its journal, where nobody names another place."""

from __future__ import annotations

from pathlib import Path

from semgrad_guard.folders import state_folder


def log_address(given: str | None) -> str | Path:
    """A URL or a file: the one that was given, or the default file."""
    if given is not None:
        return given if "://" in given else Path(given)
    return _folder() / "decisions.db"


def journal_folder(address: str | Path, given: Path | None) -> Path | None:
    """The journal's folder: the one that was given; None where it is beside an SQLite file."""
    if given is None and "://" in str(address) and not str(address).startswith("sqlite"):
        return _folder() / "journal"
    return given


def _folder() -> Path:
    return state_folder(otherwise="Name a file: --log decisions.db")
