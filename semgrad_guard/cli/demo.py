"""`semgrad-guard demo`: the whole idea at work, on the embedded model or on a fetched one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from semgrad_guard.cli import options
from semgrad_guard.declared import Option
from semgrad_guard.errors import MissingExtraError
from semgrad_guard.evaluation.files import Output, make_folder, require_outputs
from semgrad_guard.named import NAMES, POCKET, folder_of

_OURS = ("semgrad_guard", "langchain_semgrad_guard")
_NEEDED = {
    "langchain_core": "langchain-core",
    "llguidance": "llguidance",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "bm25s": "bm25s",
}
"""The extra `demo`: modules, and their packages."""


def demo(
    *,
    model: Annotated[
        str,
        Option(
            f"{POCKET}, or {', '.join(NAMES[1:])} (SmolLM2-135M-Instruct in four bits, once fetched).",
            options.MODEL,
            names=NAMES,
        ),
    ] = POCKET,
    output: Annotated[
        Path | None, Option("A folder for the risk-coverage picture.", options.DATA, "FOLDER", shown="here")
    ] = None,
) -> None:
    """A retrieval chain that knows when to look things up, and when to abstain.

    Questions that the embedded model knows are answered directly; those it does not know are answered from documents;
    if the documents do not have the answer either, it abstains. A fetched model answers all from documents, with a
    calibration that ships with the package.
    """
    if absent := [package for module, package in _NEEDED.items() if find_spec(module) is None]:
        raise MissingExtraError(*absent, extra="demo")  # all at once, before anything is loaded
    from semgrad_guard.evaluation.report.drawing import is_drawn

    folder = output or Path()
    make_folder(folder)
    require_outputs([Output(folder / "risk_coverage.png", "picture of the demo", is_drawn)], inputs=[])
    folder_of(model)  # an error before anything is loaded if it is not fetched
    try:
        module: Any = import_module("langchain_semgrad_guard.demo")
        code: int = module.run(output, model=model)
    except ModuleNotFoundError as error:
        raise _named(error) from error
    raise typer.Exit(code)


def _named(error: ModuleNotFoundError) -> ModuleNotFoundError | MissingExtraError:
    """A missing package of someone else's comes with an extra; one of ours is a bug, and shows as one."""
    root = (error.name or "").partition(".")[0]
    if not root or (root in _OURS and error.name not in _OURS):
        return error
    return MissingExtraError(root, extra="demo")
