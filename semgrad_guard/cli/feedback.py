"""`semgrad-guard sample` and `semgrad-guard feedback`: answers drawn at random, and grades that come back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from semgrad_guard.cli import options, values
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.terminal import note, say_problems
from semgrad_guard.decision_log.summary import parse_since
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import InputError
from semgrad_guard.settings import LogAddress, require_name


def sample(
    *,
    output: Annotated[
        Path, Option("The sheet to fill in, a CSV file: begun, or extended by the new answers.", options.DATA, "FILE")
    ],
    size: Annotated[int, Option("How many answers to draw.", options.GRADING, "N", Bounds(1, 100_000))] = 50,
    since: options.Since = "7d",
    log: LogAddress = None,
) -> None:
    """Draw promised answers at random from the decision log, for people to grade.

    Fill in the column "correct" and give the file to `semgrad-guard feedback`. The log remembers which answers were
    drawn, and draws none twice. Grade all of them: if the hard ones are left out, the grades flatter the promise.

    A log that keeps no text (`serve --log-text`) has none for the sheet either; the answers are then found by the id of
    their request or of their decision, which the program that asked has.
    """
    from semgrad_guard.decision_log.database import opened
    from semgrad_guard.evaluation.graders.labels import SheetAnswer, extend_sheet

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


def feedback(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", parser=values.stream, help="A sheet of `sample`, or any CSV file with key and correct."
        ),
    ],
    *,
    sampling: Annotated[
        Literal["random", "all", "uncertain", "user"] | None,
        Option(
            "Why they were graded: random (drawn at random), all, uncertain, or user (a user chose them).",
            options.GRADING,
            metavar="WHY",
            shown="random for answers that the log has drawn, else user",
        ),
    ] = None,
    grader: Annotated[str | None, Option("Who graded them.", options.GRADING, check=require_name)] = None,
    log: LogAddress = None,
) -> None:
    """Put grades of delivered answers into the decision log.

    The column "key" names a decision, "correct" is TRUE or FALSE, yes or no, 1 or 0; rows without a grade are passed
    over. Rows that cannot be taken are named, and all others are kept.
    """
    from semgrad_guard.decision_log.database import require_log
    from semgrad_guard.decision_log.decision_log import open_log
    from semgrad_guard.evaluation.graders.labels import read_grades

    require_log(log)
    grades, problems = read_grades(file)
    with open_log(log) as written_to:
        written = Counter[str]()
        for key, right in grades:
            try:
                entry = written_to.feedback(key, right=right, sampling=sampling, grader=grader)
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
