"""The command line: `semgrad-guard ask | score | calibrate | ...`; torch loads when needed."""

from __future__ import annotations

from typing import Annotated

import typer

import semgrad_guard
from semgrad_guard.cli.ask import ask
from semgrad_guard.cli.calibrate import calibrate
from semgrad_guard.cli.command import add
from semgrad_guard.cli.decisions import decisions
from semgrad_guard.cli.demo import demo
from semgrad_guard.cli.evaluate import evaluate
from semgrad_guard.cli.feedback import feedback, sample
from semgrad_guard.cli.fetch import fetch
from semgrad_guard.cli.gate import gate
from semgrad_guard.cli.help import (
    ASK,
    CALIBRATE,
    DECISIONS,
    DEMO,
    EVALUATE,
    EXIT_CODES,
    FEEDBACK,
    FETCH,
    GATE,
    PLAN,
    PROBE,
    PROGRAM,
    RECALIBRATE,
    SAMPLE,
    SCORE,
    SERVE,
)
from semgrad_guard.cli.plan import plan
from semgrad_guard.cli.probe import probe
from semgrad_guard.cli.recalibrate import recalibrate
from semgrad_guard.cli.score import score
from semgrad_guard.cli.serve import serve

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


@app.callback(help=PROGRAM, epilog=EXIT_CODES)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the program itself."""


for _command, _epilog, _continues in (
    (ask, ASK, False),
    (score, SCORE, False),
    (plan, PLAN, False),
    (calibrate, CALIBRATE, True),
    (evaluate, EVALUATE, True),
    (gate, GATE, True),
    (probe, PROBE, True),
    (serve, SERVE, False),
    (decisions, DECISIONS, False),
    (sample, SAMPLE, False),
    (feedback, FEEDBACK, False),
    (recalibrate, RECALIBRATE, False),
    (fetch, FETCH, False),
    (demo, DEMO, False),
):
    add(app, _command, _epilog, continues=_continues)
