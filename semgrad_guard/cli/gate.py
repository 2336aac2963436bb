"""`semgrad-guard gate`: a check for CI that coverage and error of a calibration stay in a recorded band."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.command import ExitCode
from semgrad_guard.cli.terminal import say, say_unscored
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import Output, read_by, sole_writer
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.settings import UPSTREAM_KEY, EngineOptions, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.cli.calibrate_answers import ModelWriter, ServerWriter
    from semgrad_guard.cli.grading import Files
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.grading import AnswerGrader
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.band import Band, Departure, Measured

_SLACK = Bounds(0, 1)


def gate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Annotated[
        Path,
        Option('Questions with references, as for `calibrate`; "-" is stdin.', options.DATA, "FILE", reads="stream"),
    ],
    calibration: Annotated[Path, Option("The calibration that decides, made by `calibrate`.", options.DATA, "FILE")],
    band: Annotated[Path, Option("The recorded band: keep it with the code.", options.DATA, "FILE")],
    record: Annotated[
        bool, Option("Record the band around what is measured now, in place of an older one.", options.DATA)
    ] = False,
    coverage_slack: Annotated[
        float, Option("With --record: how far coverage may be off later, either way.", options.DECISION, "X", _SLACK)
    ] = 0.05,
    error_slack: Annotated[
        float, Option("With --record: how far the error may be above it later.", options.DECISION, "X", _SLACK)
    ] = 0.02,
    model: EngineOptions,
    grader: Annotated[
        str | None,
        options.grader_option(
            "What counts as correct, as for `calibrate`. Verdicts of a model or judge are kept next to the band.",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        Option("Keep the answers there, and take those that are there.", options.DATA, "FILE", shown="answered anew"),
    ] = None,
    batch_size: options.BatchSize = 8,
    decoding: options.Decoding,
    wording: options.Wording,
    columns: options.AnsweredColumns,
    probe: options.ProbeFile = None,
    server: Annotated[
        str | None,
        Option(
            "The server with OpenAI's protocol that answers, where the calibration is about its answers; --model is "
            f"its name for the model, and its key stands in the environment, {UPSTREAM_KEY}.",
            options.DATA,
            "URL",
        ),
    ] = None,
    on_no_threshold: OnNoThreshold = "abstain",
    as_json: options.AsJson = False,
) -> None:
    """Fail where the coverage or the error of a calibration on labelled questions leaves a recorded band.

    The model answers the questions, as a guard with the calibration would have it; the grader compares the answers
    with the references. Coverage is the share of the questions whose answers are let through under the promise, the
    error is the share of wrong ones among these. The same answers have the same verdict in every run, whatever the
    number of threads or the batch size.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli import grading
    from semgrad_guard.cli.calibrate_answers import require_at_server
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.band import Band, digest

    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system)
    files = grading.Files(band, answers)  # answers that nobody keeps are next to the band until the command ends
    phrasing, sources = loading.phrasing(wording)
    given = [path for path in (data, calibration, Path(model.model), probe) if path is not None]
    made = [Output(band, "band", read_by(Band.load))] if record else []
    files.require(*made, inputs=[*given, *sources, *([] if record else [band])])
    recorded = None if record else Band.load(band)
    rows = loading.read_data(data, columns, strict=True).rows
    phrasing.require(rows)
    policy = Policy.from_calibration(Calibration.load(calibration), on_no_threshold=on_no_threshold)
    loading.tell_promise(policy)
    graders = grading.load_graders([] if grader is None else [grader])
    if server is not None:
        require_at_server(model, probe=probe)
    source = ModelSource(**vars(model), semantic_token=None if server is not None else loading.load_token(probe))
    writer = writer_for(
        policy,
        source,
        server,
        decoding=loading.decoding(decoding),
        phrasing=phrasing,
        template=phrasing.name(rows),
        batch_size=batch_size,
    )
    grader_used = next(iter(graders), GRADERS[default_grader(writer.prompt_name(phrasing.name(rows)))])
    if recorded is not None:  # now, and not after the answers
        recorded.require(questions=digest(rows), grader=grader_used.name)
    with sole_writer(band):
        measured = measure(rows, writer, policy, grader_used, files)
        made = recorded or Band.record(measured, coverage_slack=coverage_slack, error_slack=error_slack)
        left = made.left_by(measured)
        if record:
            made.save(band)
        if answers is None:
            files.answers.unlink()
    show(measured, made, left, band if record else None, as_json=as_json)
    raise typer.Exit(ExitCode.GATE if left else ExitCode.OK)


def writer_for(
    policy: Policy,
    source: ModelSource,
    server: str | None,
    *,
    decoding: GenerationOptions,
    phrasing: Phrasing,
    template: str,
    batch_size: int,
) -> ModelWriter | ServerWriter:
    """The model or the server that answers as the calibration's did.

    Raises:
        BindingMismatchError: the calibration was made for something else.
        InputError: it is bound to nothing.
    """
    from semgrad_guard.cli.calibrate_answers import ModelWriter, ServerWriter
    from semgrad_guard.guard import estimator_of
    from semgrad_guard.guard.reported import ReportedScorer

    bound = policy.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits. Calibrate again.")
    if server is None:
        estimator = estimator_of(policy.calibration)
        named = {estimator.name: estimator}
        writer = ModelWriter(loading.load(source), named, template, decoding, phrasing, batch_size)
        mine = writer.binding(bound.grader or "", bound.upstream)(estimator)
    else:
        scorer = ReportedScorer.of(source.model, policy.calibration)
        writer = ServerWriter(server, scorer, decoding, phrasing, batch_size)
        mine = writer.binding(bound.grader or "", bound.upstream)(None)
    policy.check(mine)
    for name in ("max_tokens", "stop", "options") if bound.max_tokens is not None else ():
        was, now = getattr(bound, name), getattr(mine, name)
        if was != now:
            raise BindingMismatchError(
                f"The calibration's answers were made with {name} {was!r}, and these would be with {now!r}. Give the "
                "options of the calibration."
            )
    return writer


def measure(
    rows: Sequence[Question],
    writer: ModelWriter | ServerWriter,
    policy: Policy,
    grader: AnswerGrader,
    files: Files,
) -> Measured:
    """Answer, grade, and decide as a guard with this policy does."""
    from semgrad_guard.cli import grading
    from semgrad_guard.paper.band import Measured, decided, digest

    answers = writer.answers(rows, files.answers, writer.phrasing.name(rows))
    say_unscored(answers)
    grades = grading.grade(rows, answers, grader, book=files.grades)
    estimator = "" if policy.binding is None else policy.binding.estimator
    prompts = writer.phrasing.forms(rows, writer.form)
    decisions = [
        decided(answer, right, policy, score=answer.uncertainty(estimator), prompt=prompt)
        for answer, right, prompt in zip(answers, grades.correct, prompts, strict=True)
        if isinstance(right, bool)  # an abstention is neither right nor wrong
    ]
    return Measured(digest(rows), grades.grader, policy.calibration_id or "", decisions)


def show(measured: Measured, band: Band, left: Sequence[Departure], recorded_in: Path | None, *, as_json: bool) -> None:
    """The verdict, for people or as JSON."""
    effect = measured.readings[0]
    strange = Counter(reason for one in measured.answers for reason in one.unfamiliar)
    for reason, count in strange.items():
        say(f"nothing is promised about {count} of {effect.answers} answers: {reason}.", label="Warning")
    if as_json:
        document = {
            "passed": not left,
            "left": [{**asdict(one), "range": one.range.model_dump()} for one in left],
            "coverage": effect.coverage,
            "error": effect.delivered_error,
            "answers": effect.answers,
            "delivered": effect.delivered,
            "delivered_wrong": effect.delivered_wrong,
            "at_threshold": sum(one.at_threshold for one in measured.answers),
            "unfamiliar": strange,
            "calibration_id": measured.calibration_id,
            "band": band.model_dump(mode="json"),
        }
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    error = "none" if effect.delivered_error is None else f"{effect.delivered_error:.1%}"
    typer.echo(f"coverage {effect.coverage:.1%} ({effect.delivered} of {effect.answers}), band {band.coverage}")
    typer.echo(f"error    {error} ({effect.delivered_wrong} of {effect.delivered}), band {band.error}")
    for one in left:
        typer.echo(f"{one}.")
    if recorded_in is not None:
        typer.echo(f"The band is in {recorded_in}; keep it with the code.")
    else:
        typer.echo("The gate fails." if left else "The gate passes.")
