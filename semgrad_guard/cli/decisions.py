"""The commands about a decision log: `decisions`, `sample`, `feedback` and `recalibrate`."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from semgrad_guard.cli.command import ExitCode
from semgrad_guard.cli.terminal import OUT, note, say_problems
from semgrad_guard.decision_log.entries import Decision, Price, Row, parse_since
from semgrad_guard.errors import InputError

_COLUMNS = ("decisions", "answer", "escalate", "abstain", "unscored", "drift")


def decisions(
    *,
    since: str = "7d",
    log: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
    price: Price | None = None,
) -> None:
    """Count the decisions: how many answers were let through, by day and in all.

    Where the mode enforces nothing (annotate), every answer went out. Those that went out against the advice
    are counted below the table, and so are those that went out without some of their sentences.

    Feedback on answers that were drawn at random (`semgrad-guard sample`) is counted apart: by it, the promise of each
    calibration is kept, unknown or broken.

    Where answers were escalated, sums over blocks of 20 requests tell what was not sent to the target, and what the
    drafts of escalated requests cost.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    from semgrad_guard.decision_log.database import opened
    from semgrad_guard.decision_log.decision_log import watched_promises

    moment = parse_since(since)
    with opened(log) as database:
        rows = database.decisions(since=moment)
        promises, saved = watched_promises(database), database.savings(since=moment).words(price)
    whole, days = _summary(f"since {since}", rows), _by_day(rows)
    if as_csv:
        typer.echo(_csv(rows), nl=False)
    elif as_json:
        found = [{**one.model_dump(), "words": str(one)} for one in promises]
        report = {"summary": whole, "days": days, "savings": saved, "promises": found}
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        OUT.print(_table([*days, whole]))
        if whole["partly"]:
            OUT.print(f"Partly withheld: some sentences of {whole['partly']} answers were left out.")
        if whole["flagged"]:
            OUT.print(f"Flagged: {whole['flagged']} answers went out against the advice, as nothing was enforced.")
        for sentence in saved:
            OUT.print(sentence)
        for way, graded in whole["feedback"].items():
            OUT.print(f"Feedback ({way}): {graded['right']} right, {graded['wrong']} wrong.")
        for one in promises:
            OUT.print(f"Promise of calibration {one.calibration_id}: {one}")


def _summary(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of decisions; `coverage` is the share whose own answer was delivered, whole or in part."""
    made = [decision for decision, _ in rows]
    actions = Counter(decision.delivery for decision in made)
    grades = Counter((feedback.sampling, feedback.right) for _, feedback in rows if feedback is not None)
    return {
        "label": label,
        "decisions": len(made),
        **{action: actions[action] for action in ("answer", "escalate", "abstain")},
        "partly": sum(decision.is_part for decision in made),
        "flagged": sum(decision.action != decision.delivery for decision in made),
        "unscored": sum(decision.uncertainty is None for decision in made),
        "drift": sum(bool(decision.drift) for decision in made),
        "coverage": actions["answer"] / len(made) if made else None,
        "feedback": {
            way: {"right": grades[way, True], "wrong": grades[way, False]} for way in sorted({way for way, _ in grades})
        },
    }


def _by_day(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One summary for each day (UTC) that has decisions, the first day first."""
    days: dict[str, list[Row]] = {}
    for row in rows:
        days.setdefault(row[0].at.astimezone(UTC).date().isoformat(), []).append(row)
    return [_summary(day, days[day]) for day in sorted(days)]


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [*Decision.model_fields, "right", "sampling", "delivery"])
    writer.writeheader()
    for decision, feedback in rows:
        graded = {} if feedback is None else {"right": feedback.right, "sampling": feedback.sampling}
        writer.writerow({**decision.model_dump(mode="json"), **graded, "delivery": decision.delivery})
    return out.getvalue()


def _table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    # "drift" are those made while the drift alarm was on. All columns fit into 80 characters.
    table = Table("", *_COLUMNS, "coverage", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for one in summaries:
        coverage = "-" if one["coverage"] is None else f"{one['coverage']:.2f}"
        table.add_row(one["label"], *(str(one[name]) for name in _COLUMNS), coverage)
    return table


def sample(*, output: Path, size: int = 50, since: str = "7d", log: str | None = None) -> None:
    """Draw promised answers at random from the decision log, for people to grade.

    Fill in the column "correct" and give the file to `semgrad-guard feedback`. The log remembers which answers were
    drawn, and draws none twice. Grade all of them: if the hard ones are left out, the grades flatter the promise.

    A log that keeps no text (the server's setting log_text) has none for the sheet either; the answers are then found
    by the id of their request or of their decision, which the program that asked has.
    """
    from semgrad_guard.decision_log.database import opened
    from semgrad_guard.grading.sheets import SheetAnswer, extend_sheet

    moment = parse_since(since)
    with opened(log) as database:
        drawn = database.draw(size, since=moment)
        if not drawn:
            raise InputError(
                f"since {since} there is no promised answer that was not drawn before; give an earlier --since"
            )
        questions = [one.question or f"(request {one.request_id or one.id})" for one in drawn]
        rows = [SheetAnswer(one.id, text, (), one.delivered or "") for one, text in zip(drawn, questions, strict=True)]
        extend_sheet(output, rows)
        database.mark_drawn([one.id for one in drawn])
    note(f"{len(drawn)} answers are in {output}: fill in the column 'correct', and run semgrad-guard feedback {output}")


def feedback(file: Path, *, log: str | None = None) -> None:
    """Put grades of delivered answers into the decision log.

    The column "key" names a decision, "correct" is TRUE or FALSE, yes or no, 1 or 0; rows without a grade are passed
    over. Rows that cannot be taken are named, and all others are kept. Only grades of answers that the log has drawn
    (`semgrad-guard sample`) count for a promise. They take the place of earlier grades, those of clients included.
    """
    from semgrad_guard.decision_log.database import log_address
    from semgrad_guard.decision_log.decision_log import DecisionLog
    from semgrad_guard.grading.sheets import read_grades

    address = log_address(log, known=True)
    grades, problems = read_grades(file)
    with DecisionLog(address) as written_to:
        written = Counter[str]()
        for key, right in grades:
            try:
                entry = written_to.feedback(key, right=right, corrects=True)
            except InputError as error:
                problems.append(f"{key!r} is passed over: {error}.")
            else:
                written[entry.note or ""] += 1
        is_in_database = written_to.flush()
    for text, count in written.items():
        if text:
            note(f"{count} grades: {text}.")
    where = "in the log" if is_in_database else "safe in the journal, until the database is back"
    typer.echo(f"{written.total()} grades are {where}; {written['']} of them are new, and count for a promise.")
    say_problems(problems)
    if problems:
        raise typer.Exit(ExitCode.BROKEN_LINES)


def recalibrate(*, calibration: Path, output: Path, since: str = "30d", log: str | None = None) -> None:
    """Propose a new calibration from the decision log: with the same promise, by answers graded since some time.

    It takes the grades of promised answers that were drawn at random (`semgrad-guard sample`). Where the promise is
    broken, draw and grade new ones first: grades from before the change are no draws from the present questions.

    Nothing switches by itself. Give the new file to the guard or the server if you agree; earlier decisions keep the id
    of the calibration that they were made by. The threshold can only become lower or stay, because answers above it
    were not delivered and not graded. A proposal in the place of an earlier one is a further try, and takes a share of
    delta.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.calibration.calibrating import recalibrate as recalibrated
    from semgrad_guard.decision_log.database import opened

    if output.exists() and output.resolve() == calibration.resolve():
        raise InputError("--output is the calibration that decides now: give the proposal a file of its own")
    old, moment = Calibration.load(calibration), parse_since(since)
    old = old if old.reachable is None else old.reached()
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
