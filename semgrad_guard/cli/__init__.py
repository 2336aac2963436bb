"""The command line: `semgrad-guard ask | score | calibrate | ...`, with the ends of the help pages: examples, and the
meaning of the exit codes. torch loads when needed.
"""

from __future__ import annotations

from typing import Annotated

import typer

import semgrad_guard
from semgrad_guard.cli.ask import ask
from semgrad_guard.cli.calibrate import calibrate
from semgrad_guard.cli.command import add, flowing
from semgrad_guard.cli.decisions import decisions, feedback, recalibrate, sample
from semgrad_guard.cli.evaluate import evaluate
from semgrad_guard.cli.gate import gate
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


def _page(codes: str, *examples: str, line: str = "", optional: str = "", advice: str = "") -> str:
    """The end of a page: examples, a line of the data file with its `optional` fields, advice, and exit codes."""
    parts = ["\n".join(["[bold]Examples[/]", *examples])]
    if line:
        parts.append(f"[bold]A line of the file[/]{optional and ' '}{optional}\n{line}")
    parts += [advice] if advice else []
    return "\n\n".join([*parts, f"[bold]Exit codes[/]\n{codes}"])


_COMMANDS = {
    ask: _page(
        "0 answered, 3 abstained, 6 withheld, as it could not be scored, 1 error, 2 wrong usage",
        'semgrad-guard ask "What is the capital of France?"',
        'semgrad-guard ask "Who wrote Emma?" --model ./my-model --calibration calibration.json',
        'echo "Who wrote Emma?" | semgrad-guard ask - --json',
    ),
    score: _page(
        "0 done, 5 some texts were left out, 6 some have no score, 1 error, 2 wrong usage",
        "semgrad-guard score --data answers.jsonl --output scores.jsonl",
        "semgrad-guard score --data answers.jsonl --calibration calibration.json",
        "semgrad-guard score --data answers.jsonl --by sentence",
        "cat answers.jsonl | semgrad-guard score --data - --json",
        line='{"question": "Who wrote Emma?", "response": "Jane Austen"}',
    ),
    plan: _page(
        "0 done, 2 wrong usage",
        "semgrad-guard plan --error 0.2 --auroc 0.8",
        "semgrad-guard plan --error 0.3 --answers calibration.answers.jsonl",
        "semgrad-guard plan --error 0.3 --auroc 0.75 --alpha 0.2 --labels 150 --json",
    ),
    calibrate: _page(
        (
            "0 done, 4 no threshold keeps the promise, 5 some lines were broken, 6 no answer could be scored, 1 error, "
            "2 wrong usage, 130 interrupted"
        ),
        "semgrad-guard calibrate --data questions.jsonl --output calibration.json",
        "semgrad-guard calibrate --data questions.jsonl --output calibration.json --alpha 0.05",
        line='{"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}',
        optional='(and "context": "...", to answer from a passage)',
        advice=(
            "With alpha = delta = 0.1 you need at least 23 questions; [bold]semgrad-guard plan[/] tells how many are "
            "enough. Every answer is kept as it comes: after Ctrl-C, run the same command again."
        ),
    ),
    evaluate: _page(
        "0 done, 5 some lines were broken, 6 no answer could be scored, 1 error, 2 wrong usage, 130 interrupted",
        "semgrad-guard evaluate --data questions.jsonl --output results",
        "semgrad-guard evaluate --data questions.csv --output results --methods hybridgrad --methods gnll",
        "semgrad-guard evaluate --output results --regrade --grader rouge-l --grader judge=openai:gpt-4.1",
        "semgrad-guard evaluate --output results --regrade --labels results/labels.csv",
        line='{"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}',
        optional='(and "kind": "...", to tell sorts of questions apart)',
        advice=(
            "Every answer is kept as it comes: after Ctrl-C, run the same command again. People grade in "
            "results/labels.csv, which is never overwritten."
        ),
    ),
    gate: _page(
        (
            "0 inside the band, or recorded, 7 outside, 1 an error (the calibration does not fit, a broken line, other "
            "questions), 2 wrong usage, 130 interrupted"
        ),
        "semgrad-guard gate --calibration calibration.json --data questions.jsonl --band band.json --record",
        "semgrad-guard gate --calibration calibration.json --data questions.jsonl --band band.json",
        advice=(
            "Give the model, prompt and options of the calibration. Other questions than those that it was made from "
            "tell more."
        ),
    ),
    probe: _page(
        "0 done, 5 some lines were broken, 1 error, 2 wrong usage, 130 interrupted",
        "semgrad-guard probe --data questions.jsonl --output probe.json",
        "semgrad-guard probe --data questions.jsonl --output probe.json --model ./my-model --no-answers",
        line=(
            '{"question": "Who wrote Emma?", "paraphrases": ["Emma was written by whom?"], "answers": ["Jane Austen"]}'
        ),
        advice=(
            "The token that the chat template itself points to is kept unless graded answers speak against it; fifty "
            "right and fifty wrong ones can. After Ctrl-C, run the same command again."
        ),
    ),
    serve: _page(
        "0 ended by a signal, requests that had begun are finished; 1 error, 2 wrong usage",
        "semgrad-guard serve",
        "semgrad-guard serve --model ./my-model --calibration calibration.json",
        "semgrad-guard serve --upstream http://localhost:8080/v1 --scorer ./my-model --threshold 0.002",
        "semgrad-guard serve --escalate-to https://other.example/v1#large",
    ),
    decisions: _page(
        "0 done, 1 error, 2 wrong usage",
        "semgrad-guard decisions",
        "semgrad-guard decisions --since 24h --json",
        "semgrad-guard decisions --since 30d --csv > decisions.csv",
    ),
    sample: _page(
        "0 done, 1 error, 2 wrong usage",
        "semgrad-guard sample --output sheet.csv",
        "semgrad-guard sample --size 100 --since 30d --output sheet.csv",
    ),
    feedback: _page(
        "0 done, 1 error, 2 wrong usage, 5 some rows could not be taken", "semgrad-guard feedback sheet.csv"
    ),
    recalibrate: _page(
        "0 done, 4 no threshold keeps the promise (it is saved all the same), 1 error, 2 wrong usage",
        "semgrad-guard recalibrate --calibration calibration.json --output proposed.json",
        "semgrad-guard recalibrate --calibration calibration.json --since 2026-11-01 --output proposed.json",
    ),
    fetch: _page(
        "0 done, or there already, 1 error, 2 wrong usage, 130 interrupted (nothing is kept)",
        "semgrad-guard fetch smollm2",
        'semgrad-guard ask "Who wrote Emma?" --model smollm2',
    ),
    demo: _page(
        "0 done, 1 error, 130 interrupted",
        "semgrad-guard demo",
        "semgrad-guard demo --output ./demo",
        "semgrad-guard fetch smollm2; semgrad-guard demo --model smollm2",
    ),
}
"""The commands, with the ends of their help pages."""

for _command, _epilog in _COMMANDS.items():
    add(app, _command, _epilog, continues=_command in _RESUMED)
