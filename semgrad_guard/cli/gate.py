"""`semgrad-guard gate`: a check for CI that coverage and error of a calibration stay in a recorded band."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.evaluation.files import sole_writer
from semgrad_guard.loading import ModelSource
from semgrad_guard.settings import UPSTREAM_KEY, EngineOptions

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
    from semgrad_guard.cli.calibrate_server import require_at_server
    from semgrad_guard.cli.gate_run import Files, measure, show, writer_for
    from semgrad_guard.evaluation.band import Band, digest
    from semgrad_guard.evaluation.graders import GRADERS, default_grader
    from semgrad_guard.guard import Policy

    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system)
    files = Files(band, answers)
    phrasing, sources = loading.phrasing(wording)
    given = [path for path in (data, calibration, Path(model.model), probe) if path is not None]
    files.check([*given, *sources], record=record)
    recorded = None if record else Band.load(band)
    rows = loading.read_data(data, columns, strict=True).rows
    phrasing.require(rows)
    policy = Policy.from_calibration(Calibration.load(calibration))
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
