"""The command line: `semgrad-guard ask | score | calibrate | ...`. torch loads when needed."""

from __future__ import annotations

from typing import Annotated

import typer

import semgrad_guard
from semgrad_guard.cli.ask import ask
from semgrad_guard.cli.calibrate import calibrate
from semgrad_guard.cli.command import add
from semgrad_guard.cli.decisions import decisions, feedback, recalibrate, sample
from semgrad_guard.cli.evaluate import evaluate
from semgrad_guard.cli.gate import gate
from semgrad_guard.cli.options import flowing
from semgrad_guard.cli.probe import probe
from semgrad_guard.cli.score import score
from semgrad_guard.cli.serve import serve
from semgrad_guard.cli.short_commands import demo, fetch, plan

__all__ = ["app"]

PROGRAM = flowing("""
Measure how sure a local language model is of each answer, and withhold the ones above a calibrated threshold.

Start with [bold]semgrad-guard ask "What is the capital of France?"[/] on the embedded model, or see the whole idea at
work with [bold]semgrad-guard demo[/].
""")

EXIT_CODES = """
[bold]Exit codes[/]
0  done; for ask: answered
1  an error, with a message on stderr that tells how to fix it
2  wrong usage
3  ask: abstained, the answer was too uncertain
4  calibrate: no threshold keeps the promise (it is saved all the same)
5  some data lines were skipped (takes precedence over 4)
6  ask, score: an answer has no score; calibrate, evaluate: none has one
7  gate: coverage or error has left the recorded band
130  interrupted by Ctrl-C (143, 129: by SIGTERM, SIGHUP)

Run an interrupted command again: calibrate, evaluate, gate and probe resume where they stopped, the others begin anew.
""".strip()

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


_RESUMED = (calibrate, evaluate, gate, probe)
"""Commands that resume where they stopped when they are run again."""


_COMMANDS = (
    *(ask, score, plan, calibrate, evaluate, gate, probe, serve),
    *(decisions, sample, feedback, recalibrate, fetch, demo),
)
for _command in _COMMANDS:
    add(app, _command, continues=_command in _RESUMED)
