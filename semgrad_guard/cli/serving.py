"""`semgrad-guard serve`, and the commands about a decision log: `decisions`, `sample`, `feedback`, `recalibrate`."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, cast

import typer
from pydantic import ValidationError
from pydantic_core import from_json
from rich.box import SIMPLE_HEAD
from rich.table import Table

from semgrad_guard.cli import from_options
from semgrad_guard.cli.terminal import OUT, ExitCode, note, say_problems
from semgrad_guard.decision_log.entries import Decision, Price, Row, parse_since
from semgrad_guard.declared import first_fault
from semgrad_guard.errors import InputError, require_installed
from semgrad_guard.questions.data_files import harmless, read_text
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.settings import DtypeName, JudgedBy, Mode, OnDoubt, OnNoThreshold


def serve(  # noqa: PLR0913  # a command's options are its arguments
    *,
    model: list[str] | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    engine: str = "transformers",
    estimator: str | None = None,
    calibration: list[str] | None = None,
    threshold: float | None = None,
    on_no_threshold: OnNoThreshold = "abstain",
    mode: Mode = "enforce",
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    max_tokens: int = 256,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    api_key_file: Path | None = None,
    timeout: float | None = None,
    log: str | None = None,
    upstream: str | None = None,
    scorer: str | None = None,
    escalate_to: str | None = None,
    settings: Path | None = None,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    given: dict[str, Any] = {**locals()}  # by the names of the settings
    del given["host"], given["port"], given["settings"]
    given |= {name: tuple(given[name] or ()) for name in ("model", "calibration", "allow_host")}
    given |= {"template_option": dict(template_option or ()) or None}
    given |= {"engine": from_options.engine_arguments(engine)}
    unset = {name: (None, (), field.default) for name, field in ServerSettings.model_fields.items()}
    made = settings_of({name: value for name, value in given.items() if value not in unset[name]}, settings)
    require_installed("starlette", "uvicorn", "prometheus_client", "sqlalchemy", "httpx", extra="serve")
    from semgrad_guard.server.assembly import allowed_hosts, assemble, bound_to, keys_of, run, url_of

    keys = keys_of(made)
    hosts = allowed_hosts(host, has_keys=bool(keys), named=made.allow_host)
    bound = bound_to(host, port)  # an error before anything is loaded
    server = assemble(made, keys=keys, hosts=hosts, load=from_options.load)
    line = f"Serving {', '.join(server.service.models)} at {url_of(bound)}"
    try:
        run(server.app, bound, connections=made.connections, started=lambda: typer.echo(line))
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")


def settings_of(given: dict[str, Any], file: Path | None) -> ServerSettings:
    """The settings of the options and of a file.

    Raises:
        BadParameter: an option is in both, or two contradict each other.
        InputError: the file holds something else.
    """
    try:
        kept: Any = {} if file is None else from_json(read_text(file))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(kept, dict):
        raise InputError(f'{file} holds no settings: write an object such as {{"queue": 64}}')
    in_file = cast("dict[str, Any]", kept)
    if twice := sorted(in_file.keys() & given.keys()):
        raise typer.BadParameter(f"{twice[0]} stands in {file} and among the options; give it once")
    try:
        return ServerSettings(**in_file, **given)
    except ValidationError as error:
        raise typer.BadParameter(first_fault(error, place=bool(in_file))) from error


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
    of_days: dict[str, list[Row]] = {}  # UTC, the first day first
    for row in sorted(rows, key=lambda row: row[0].at):
        of_days.setdefault(row[0].at.astimezone(UTC).date().isoformat(), []).append(row)
    whole, days = _summary(f"since {since}", rows), [_summary(day, own) for day, own in of_days.items()]
    if as_csv:
        _write_csv(rows)
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


def _write_csv(rows: Sequence[Row]) -> None:
    out = csv.DictWriter(sys.stdout, [*Decision.model_fields, "right", "sampling", "delivery"])
    out.writeheader()
    for decision, feedback in rows:
        graded = {} if feedback is None else {"right": feedback.right, "sampling": feedback.sampling}
        row = {**decision.model_dump(mode="json"), **graded, "delivery": decision.delivery}
        out.writerow({name: harmless(cell) if isinstance(cell, str) else cell for name, cell in row.items()})


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
