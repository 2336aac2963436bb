"""`semgrad-guard gate`: a check for CI that coverage and error of a calibration stay in a recorded band."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import ExitCode
from semgrad_guard.cli.terminal import say, say_unscored
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.loading import ModelSource
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import Output, read_by, sole_writer
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.settings import DtypeName, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli.answers import ModelWriter, ServerWriter
    from semgrad_guard.cli.grading import Files
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.grading import AnswerGrader
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.band import Band, Departure, Measured


def gate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    calibration: Path,
    band: Path,
    record: bool = False,
    column: loading.Pairs | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: loading.Pairs | None = None,
    engine: str = "transformers",
    on_no_threshold: OnNoThreshold = "abstain",
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    grader: str | None = None,
    as_json: bool = False,
) -> None:
    """Fail where the coverage or the error of a calibration on labelled questions leaves a recorded band.

    The model answers the questions, as a guard with the calibration would have it; the grader compares the answers
    with the references. Coverage is the share of the questions whose answers are let through under the promise, the
    error is the share of wrong ones among these. The same answers have the same verdict in every run, whatever the
    number of threads or the batch size.
    """
    from semgrad_guard.cli import grading
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.grading import GRADERS, default_grader
    from semgrad_guard.paper.band import Band, digest

    options.one_from_stdin(data=data, prompt=prompt, system=system)
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(band)  # the answers are next to the band until the command ends
    phrasing, sources = loading.phrasing(prompt, system)
    made = [Output(band, "band", read_by(Band.load))] if record else []
    files.require(*made, inputs=[data, calibration, Path(model), *sources, *([] if record else [band])])
    recorded = None if record else Band.load(band)
    rows = loading.read_data(data, column, strict=True).rows
    phrasing.require(rows)
    policy = cast("Policy", loading.load_policy(calibration, on_no_threshold))
    graders = grading.load_graders([] if grader is None else [grader])
    writer = writer_for(
        policy,
        source,
        loading.server_of(engine),
        decoding=GenerationOptions(max_tokens=max_tokens, seed=0),
        phrasing=phrasing,
        template=phrasing.name(rows),
    )
    grader_used = next(iter(graders), GRADERS[default_grader(writer.prompt_name(phrasing.name(rows)))])
    if recorded is not None:  # now, and not after the answers
        recorded.require(questions=digest(rows), grader=grader_used.name)
    with sole_writer(band):
        measured = measure(rows, writer, policy, grader_used, files)
        made = recorded or Band.record(measured, coverage_slack=0.05, error_slack=0.02)
        left = made.left_by(measured)
        if record:
            made.save(band)
        files.answers.unlink()
    show(measured, made, left, policy.calibration, band if record else None, as_json=as_json)
    raise typer.Exit(ExitCode.GATE if left else ExitCode.OK)


def writer_for(
    policy: Policy,
    source: ModelSource,
    server: str | None,
    *,
    decoding: GenerationOptions,
    phrasing: Phrasing,
    template: str,
) -> ModelWriter | ServerWriter:
    """The model or the server that answers as the calibration's did.

    Raises:
        BindingMismatchError: the calibration was made for something else.
        InputError: it is bound to nothing.
    """
    from semgrad_guard.cli.answers import ModelWriter, ServerWriter
    from semgrad_guard.guard import estimator_of
    from semgrad_guard.guard.reported import ReportedScorer

    bound = policy.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits. Calibrate again.")
    if server is None:
        estimator = estimator_of(policy.calibration)
        named = {estimator.name: estimator}
        writer = ModelWriter(loading.load(source), named, template, decoding, phrasing, on_cut=policy.on_cut or "score")
        mine = writer.binding(bound.grader or "")(estimator)
    else:
        scorer = ReportedScorer.of(source.model, policy.calibration)
        writer = ServerWriter(server, scorer, decoding, phrasing, policy.on_cut or "score")
        mine = writer.binding(bound.grader or "")(None)
    mine = mine.model_copy(update={"upstream": bound.upstream})
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
    rows: Sequence[Question], writer: ModelWriter | ServerWriter, policy: Policy, grader: AnswerGrader, files: Files
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
        for answer, right, prompt in zip(answers, grades.of_answers.values(), prompts, strict=True)
        if isinstance(right, bool)  # an abstention is neither right nor wrong
    ]
    return Measured(digest(rows), grades.grader, policy.calibration_id or "", decisions)


def show(
    measured: Measured,
    band: Band,
    left: Sequence[Departure],
    calibration: Calibration | None,
    recorded_in: Path | None,
    *,
    as_json: bool,
) -> None:
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
            "alpha": calibration and calibration.alpha,
            "requested_alpha": calibration and calibration.requested,
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
