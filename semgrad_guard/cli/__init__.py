"""The command line: `semgrad-guard ask | score | calibrate | ...`. torch loads when needed."""

from __future__ import annotations

from typing import Annotated

import typer

import semgrad_guard
from semgrad_guard.cli.calibrate import calibrate, gate
from semgrad_guard.cli.command import PAGES, add, flowing
from semgrad_guard.cli.decisions import decisions, feedback, recalibrate, sample
from semgrad_guard.cli.evaluate import evaluate, probe
from semgrad_guard.cli.score import ask, score
from semgrad_guard.cli.short_commands import demo, fetch, plan, serve

__all__ = ["app"]

app = typer.Typer(
    name="semgrad-guard",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"semgrad-guard {semgrad_guard.__version__}")
        raise typer.Exit()


@app.callback(help=flowing(PAGES["program"]["help"]), epilog=PAGES["program"]["end"])
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the program itself."""


_RESUMED = (calibrate, evaluate, gate, probe)
"""Commands that resume where they stopped when they are run again."""


_COMMANDS = (
    *(ask, score, plan, calibrate, evaluate, gate, probe, serve),
    *(decisions, sample, feedback, recalibrate, fetch, demo),
)
for _command in _COMMANDS:
    add(app, _command, continues=_command in _RESUMED)
