"""`semgrad-guard evaluate`: every method on your model and your questions, graded, compared, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.terminal import say_unscored
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data_files import sole_writer
from semgrad_guard.settings import ALPHA, EngineOptions, require_name

_REPORT = "Report"


def evaluate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    output: Annotated[Path, Option("Where everything is kept and written.", options.DATA, "FOLDER")],
    data: Annotated[
        str | None,
        Option(
            "A file or folder of JSON Lines, JSON, CSV or Parquet; hub:NAME[:CONFIG][@SPLIT]; - for stdin; or "
            "pocket (questions about the embedded model's world); not needed to --regrade.",
            options.DATA,
            "SOURCE",
            check=require_name,
        ),
    ] = None,
    model: EngineOptions,
    measured: options.MethodSettings,
    answers: options.AnswerSettings,
    grader: Annotated[
        list[str] | None,
        options.grader_option(
            "contains, exact-match, token-f1, rouge-l, nli, nli=MODEL, bem=MODEL or judge=PROVIDER:MODEL; "
            "contains+judge=... hands the judge the answers on which contains comes to no verdict. "
            "Repeat the option for several: the first decides, the others are set against it.",
        ),
    ] = None,
    labels: options.Labels = None,
    regrade: Annotated[
        bool, Option("Grade the answers there are; no model is loaded.", options.GRADING, spelled="--regrade")
    ] = False,
    wording: options.Wording,
    columns: options.AnsweredColumns,
    limit: Annotated[int | None, Option("Only the first N questions.", options.DATA, "N", Bounds(1, 2**62))] = None,
    report: Annotated[bool, Option("Also tables, figures and report.html, which need matplotlib.", _REPORT)] = True,
    beside: Annotated[
        list[Path] | None, Option("Another finished evaluation for the same report.", _REPORT, "FOLDER")
    ] = None,
    alpha: Annotated[
        list[float] | None,
        Option(
            "An error rate to promise in the report; repeat the option for several.",
            _REPORT,
            "X",
            ALPHA,
            shown="0.05, 0.1, 0.2",
        ),
    ] = None,
    calibration: Annotated[
        Path | None, Option("Made by `calibrate`, maybe elsewhere: does its promise hold here?", _REPORT, "FILE")
    ] = None,
    probe: Annotated[
        Path | None, Option("Made by `probe`: its t* is used, its maps are in the report.", options.MODEL, "FILE")
    ] = None,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare all methods on your model and questions: which score best separates wrong answers from right ones,
    and at what cost?

    The model answers every question, every method scores every answer, the graders compare the answers with the
    references. Every answer is kept as it comes, with all that the numbers are made of; grading comes after, and can be
    repeated with other graders.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli import evaluate_run as steps
    from semgrad_guard.cli import grading
    from semgrad_guard.paper.probe_record import Probe

    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system, labels=labels)
    files = steps.Files(output)
    others = steps.finished(beside or [], report=report)
    held = None if calibration is None else Calibration.load(calibration)
    probed = None if probe is None else Probe.load(probe)
    models = [
        model.model,
        *(name for name in (measured.nli, measured.cross_encoder) if name),
        *(name.partition("=")[2] or name for name in grader or ()),
    ]
    phrasing, sources = loading.phrasing(wording)
    records = [*sources, *(path for path in (labels, calibration, probe) if path is not None), *(beside or ())]
    with files.made():
        files.check([*records, *map(Path, [*models, *([data] if data else [])])], report=report)
        graders = grading.load_graders(grader or (), nli=measured.nli)
        grading.check_labels(labels, begun_at=files.sheet)
        questions = steps.read(data, columns, limit=limit, strict=strict, optional=regrade)
        with sole_writer(files.run):
            if regrade:
                run = steps.kept(files, questions)
            else:
                token = None if probed is None else probed.semantic_token
                source = ModelSource(**vars(model), semantic_token=token)
                run = steps.answer(questions, files, answers, measured, phrasing=phrasing, source=source)
            results = steps.grade_run(run, graders, labels, files, questions)
            steps.write(results, files)
            if report:
                steps.report(results, others, probed, files, alphas=alpha)
        steps.show(results, files, held, as_json=as_json, reported=report)
        say_unscored(run.answers)
        broken = questions is not None and questions.problems
        unscored = all(answer.unscored is not None for answer in run.answers)
    raise typer.Exit(code_of_run(unscored=unscored, broken=broken))
