"""`semgrad-guard recalibrate`: a proposal for a new calibration, from the decisions of an old one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import options
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.decision_log.summary import parse_since
from semgrad_guard.declared import Option
from semgrad_guard.errors import InputError
from semgrad_guard.settings import LogAddress


def recalibrate(
    *,
    calibration: Annotated[Path, Option("The calibration that decides now.", options.DATA, "FILE")],
    output: Annotated[Path, Option("Where the proposal goes: a calibration.", options.OUTPUT, "FILE")],
    since: options.Since = "30d",
    log: LogAddress = None,
) -> None:
    """Propose a new calibration from the decision log: with the same promise, by answers graded since some time.

    It takes the grades of promised answers that were drawn at random (`semgrad-guard sample`). Where the promise is
    broken, draw and grade new ones first: grades from before the change are no draws from the present questions.

    Nothing switches by itself. Give the new file to the guard or the server if you agree; earlier decisions keep the id
    of the calibration that they were made by. The threshold can only become lower or stay, because answers above it
    were not delivered and not graded. A proposal in the place of an earlier one is a further try, and takes a share of
    delta.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.calibration.recalibrating import recalibrate as recalibrated
    from semgrad_guard.decision_log.database import opened

    if output.exists() and output.resolve() == calibration.resolve():
        raise InputError("--output is the calibration that decides now: give the proposal a file of its own")
    old, moment = Calibration.load(calibration), parse_since(since)
    tries = Calibration.load(output).tries + 1 if output.exists() else 1
    with opened(log) as database:
        decided = [row for row, _ in database.decisions(since=moment) if row.calibration_id == old.id]
        graded = database.random_grades().get(old.id, {})
    scores = {row.id: row.uncertainty for row in decided}
    known = ((scores.get(name), right) for name, right in graded.items())
    grades = [(score, right) for score, right in known if score is not None]
    proposal = recalibrated(old, list(scores.values()), grades, tries=tries)
    proposal.new.save(output)
    typer.echo(str(proposal))
    typer.echo(f"It is saved in {output} as calibration {proposal.new.id}. Calibration {old.id} still decides.")
    if proposal.new.threshold is None:
        raise typer.Exit(ExitCode.NO_THRESHOLD)
