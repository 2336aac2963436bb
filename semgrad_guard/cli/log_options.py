"""Where the decision log is: what `serve` writes, and `decisions` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import values
from semgrad_guard.folders import state_folder

LogAddress = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="FILE",
        parser=values.source,
        envvar="SEMGRAD_GUARD_LOG",
        help="The decision log: a file (SQLite), or a URL such as postgresql+psycopg://user@host/name; also as "
        "SEMGRAD_GUARD_LOG in the environment.",
        show_default="semgrad-guard/decisions.db in your state folder",
        rich_help_panel="Decision log",
    ),
]


def log_address(given: str | None) -> str | Path:
    """What the option says, or the default file."""
    if given is not None:
        return given if "://" in given else Path(given)
    return log_folder() / "decisions.db"


def log_folder() -> Path:
    """The folder of the log and its journal, where no other is named."""
    return state_folder(otherwise="Name a file: --log decisions.db")
