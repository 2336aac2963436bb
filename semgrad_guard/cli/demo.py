"""`semgrad-guard demo`: the whole idea at work, on the embedded model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from semgrad_guard.errors import MissingExtraError

_OURS = ("semgrad_guard", "langchain_semgrad_guard")


def demo(
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder for the risk-coverage picture.", show_default="here")
    ] = None,
) -> None:
    """A retrieval chain that knows when to look things up, and when to say nothing.

    Questions that the embedded model knows are answered directly; those it does not know are answered from documents;
    those answered nowhere end in an abstention.
    """
    try:
        module: Any = import_module("langchain_semgrad_guard.demo")
        code: int = module.run(output)
    except ModuleNotFoundError as error:
        raise _named(error) from error
    raise typer.Exit(code)


def _named(error: ModuleNotFoundError) -> ModuleNotFoundError | MissingExtraError:
    """A missing package of someone else's comes with an extra; one of ours is a bug, and shows as one."""
    root = (error.name or "").partition(".")[0]
    if not root or (root in _OURS and error.name not in _OURS):
        return error
    return MissingExtraError(root, extra="demo")
