"""The run of `gate`: answers as a calibration has them, their grades, and the decisions about them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from semgrad_guard.cli import grading, loading
from semgrad_guard.cli.calibrate_model import ModelWriter
from semgrad_guard.cli.calibrate_server import ServerWriter
from semgrad_guard.cli.loading import Cluster
from semgrad_guard.cli.terminal import say, say_unscored
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.evaluation.band import Band, Departure, Measured, decided, digest
from semgrad_guard.evaluation.files import Output, beside, read_by, require_outputs
from semgrad_guard.evaluation.graders import AnswerGrader
from semgrad_guard.evaluation.graders.grading import GRADES
from semgrad_guard.evaluation.job_record import is_record
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.guard import Policy, estimator_of
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.loading import ModelSource


@dataclass(frozen=True)
class Files:
    """The files of the command. Answers that nobody keeps lie next to the band until the command ends."""

    band: Path
    kept: Path | None

    @property
    def answers(self) -> Path:
        """The record of answers."""
        return self.kept or beside(self.band, ".answers.jsonl")

    @property
    def grades(self) -> Path:
        """The verdicts of models and judges."""
        return beside(self.band, ".grades.jsonl")

    def check(self, inputs: Sequence[Path], *, record: bool) -> None:
        """Refuse, before any work, a file that cannot be written."""
        written = [Output(self.answers, "record of answers", is_record())]
        written += [Output(self.grades, "record of grades", is_record(GRADES))]
        written += [Output(self.band, "band", read_by(Band.load))] if record else []
        require_outputs(written, inputs=inputs if record else [*inputs, self.band])


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
    bound = policy.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits. Calibrate again.")

    if server is None:
        estimator = estimator_of(policy.calibration)
        named = {estimator.name: estimator}
        writer = ModelWriter(loading.load(source), named, template, decoding, phrasing, batch_size, Cluster(), source)
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
    answers = writer.answers(rows, files.answers, writer.phrasing.name(rows))
    say_unscored(answers)
    grades = grading.grade(rows, answers, grader, book=files.grades)
    by_kind = policy.calibration is not None and bool(policy.calibration.kinds)
    estimator = "" if policy.binding is None else policy.binding.estimator
    decisions = [
        decided(
            answer,
            right,
            policy,
            score=answer.uncertainty(estimator),
            kind=row.kind if by_kind else None,
            prompt=prompt,
        )
        for row, answer, right, prompt in zip(
            rows, answers, grades.correct, writer.phrasing.forms(rows, writer.form), strict=True
        )
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
