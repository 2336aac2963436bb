"""Where the decision log is: what `serve` writes, and `decisions` reads."""

from __future__ import annotations

from typing import Annotated

import typer

from semgrad_guard.cli import values

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
