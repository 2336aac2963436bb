"""`semgrad-guard decisions`: the decisions of a server, or of a guard with a log."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import options
from semgrad_guard.cli.terminal import OUT
from semgrad_guard.decision_log.entries import Decision
from semgrad_guard.decision_log.summary import Row, Summary, by_day, parse_since
from semgrad_guard.declared import Option
from semgrad_guard.settings import LogAddress

if TYPE_CHECKING:
    from rich.table import Table


_COLUMNS = ("decisions", "answer", "escalate", "abstain", "unscored")


def decisions(
    *,
    since: options.Since = "7d",
    log: LogAddress = None,
    as_csv: Annotated[
        bool, Option("Every decision as a line of CSV on stdout.", options.OUTPUT, spelled="--csv")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Count the decisions: how many answers were let through, by day and in all.

    Where the mode enforces nothing (annotate, observe), every answer went out. Those that went out against the advice
    are counted below the table.

    Feedback is counted by how the answers came to be graded. Only answers that were drawn at random speak for the
    others (`semgrad-guard sample`). By their grades, the promise of each calibration is kept, unknown or broken.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    from semgrad_guard.decision_log.database import opened
    from semgrad_guard.decision_log.watching import PromiseWatch

    moment = parse_since(since)
    with opened(log) as database:
        rows = database.decisions(since=moment)
        promises = PromiseWatch(database).look()
    whole, days = Summary.of(f"since {since}", rows), by_day(rows)
    if as_csv:
        typer.echo(_csv(rows), nl=False)
    elif as_json:
        found = {
            "summary": whole.model_dump(mode="json"),
            "days": [day.model_dump(mode="json") for day in days],
            "promises": [one.as_json() for one in promises],
        }
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        OUT.print(_table([*days, whole]))
        if whole.flagged:
            OUT.print(f"Flagged: {whole.flagged} answers went out against the advice, as nothing was enforced.")
        for way, graded in whole.feedback.items():
            OUT.print(f"Feedback ({way}): {graded.right} right, {graded.wrong} wrong.")
        for one in promises:
            OUT.print(f"Promise of calibration {one.calibration_id}: {one}")


def _csv(rows: list[Row]) -> str:
    names = [name for name in Decision.model_fields if name != "kind"]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*names, "right", "sampling", "delivery"])
    writer.writeheader()
    for decision, feedback in rows:
        graded = {} if feedback is None else {"right": feedback.right, "sampling": feedback.sampling}
        row = decision.model_dump(mode="json", exclude={"kind"})
        writer.writerow({**row, **graded, "delivery": decision.delivery})
    return out.getvalue()


def _table(summaries: list[Summary]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # "drift" are those made while the drift alarm was on. All columns fit into 80 characters.
    table = Table("", *_COLUMNS, "drift", "coverage", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for summary in summaries:
        numbers = [str(getattr(summary, name)) for name in _COLUMNS]
        table.add_row(
            summary.label,
            *numbers,
            str(summary.drifted),
            "-" if summary.coverage is None else f"{summary.coverage:.2f}",
        )
    return table
