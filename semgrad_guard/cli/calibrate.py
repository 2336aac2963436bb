"""`semgrad-guard calibrate`: the threshold that keeps a promise; and `gate`: a check that it lets as much through."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click
import typer

from semgrad_guard.cli import from_options
from semgrad_guard.cli.command import ExitCode, Output, code_of_run, one_from_stdin, read_by
from semgrad_guard.cli.terminal import ERR, note, say, say_unscored
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.loading import ModelSource
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import Phrasing, Question, QuestionFile
from semgrad_guard.questions.run_record import sole_writer
from semgrad_guard.settings import DtypeName, JudgedBy, OnCut, OnDoubt, OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.calibration.calibration_set import Copies
    from semgrad_guard.cli.drafting import ModelWriter, ServerWriter
    from semgrad_guard.cli.grading import Files
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.grading import AnswerGrader
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.coverage import Band, Departure, Measured


def calibrate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    output: Path,
    column: from_options.Pairs | None = None,
    copies: Literal["keep", "once"] | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    engine: str = "transformers",
    alpha: float = 0.1,
    delta: float = 0.1,
    estimator: str | None = None,
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    prompt: str = "plain",
    system: str | None = None,
    max_tokens: int = 256,
    on_cut: OnCut = "unscored",
    grader: str | None = None,
    labels: Path | None = None,
    by_hand: int | None = None,
    as_json: bool = False,
) -> None:
    """Find the threshold that keeps a promise: among the answers let through, at most alpha are wrong.

    The model answers every question of the file, the estimator scores the answers, the grader compares them with the
    references. The promise holds with probability 1 - delta, for questions drawn like those of the file and put in
    the same way: give the system message, the prompt and the passages that your program sends. If no threshold keeps
    it, the command says so and what would help. An estimator that learns from labels (states, auto) does so on a
    quarter of the answers, and the threshold is chosen on the rest. With --by sentence, every sentence has a score and
    a grade of its own, and the promise is about sentences.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli import grading
    from semgrad_guard.cli.rendering import show_calibration

    one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    few = labels is not None and estimator not in ("auto", *NEEDS_LABELS)
    if by_hand is not None and not few:
        raise typer.BadParameter(
            "--by-hand is for grades by people: give --labels too, and an estimator that learns nothing from them"
        )
    if labels is not None and grader is not None:
        raise typer.BadParameter(
            "people grade what --labels holds, and --grader would decide nothing: give one of them"
        )
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(output, labels=labels)
    phrasing, sources = from_options.phrasing(prompt, system)
    written = Output(output, "calibration", read_by(Calibration.load))
    files.require(written, inputs=[data, Path(model), *sources])
    questions = _read(data, column, alpha=alpha, delta=delta, copies=copies)
    from semgrad_guard.cli.runs import Run, estimators_for  # torch loads here, when the files are known
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.guard.calibrated_estimator import require_by_sentence
    from semgrad_guard.guard.policy import judged_by

    if copies is None and questions.duplicates:
        copies = _chosen(questions)
    by_sentence = judged_by(None, by, on_doubt)
    count = by_hand or 100
    questions = _drawn_questions(questions, count) if by_sentence and few else questions
    server = from_options.server_of(engine)
    known = estimators_for(estimator) if server is None else ()
    for one in known if by_sentence else ():
        require_by_sentence(one)
    graders = grading.load_graders([] if grader is None else [grader])
    grading.check_labels(labels, begun_at=labels)
    run = Run(
        source=source,
        server=server,
        estimator=estimator,
        phrasing=phrasing,
        decoding=GenerationOptions(max_tokens=max_tokens, seed=0),
        by_hand=count if few and len(questions.rows) > count else None,
        by_sentence=by_sentence,
        on_cut=on_cut,
        graders=graders,
        alpha=alpha,
        delta=delta,
        copies=copies,
    )
    with sole_writer(output):
        outcome = run(questions, files)
        if (choice := outcome.calibration.choice) is not None:
            # An estimator other than the requested one is more than a note.
            tell = note if choice.asked in ("auto", choice.estimator) else say
            tell(choice.reason, label=choice.estimator)
        outcome.calibration.save(output)
    if (effect := outcome.effect) is not None and (doubt := effect.doubt(alpha)) is not None:
        say(doubt, label="Warning")
    show_calibration(outcome, questions, files, as_json=as_json)
    made = outcome.calibration
    kept = ExitCode.OK if made.threshold is not None else ExitCode.NO_THRESHOLD
    raise typer.Exit(code_of_run(unscored=made.n_unscored == made.n, broken=questions.problems, otherwise=kept))


def _chosen(questions: QuestionFile) -> Copies:
    """What the file is, by the person at the terminal."""
    repeated = f"{len(questions.duplicates)} lines of {questions.path} repeat a question"
    if not (ERR.is_terminal and sys.stdin.isatty()):
        raise InputError(
            f"{repeated}. Is the file a sample of traffic, in which popular questions repeat, or a list of questions? "
            "Give --copies keep (the promise is about traffic), or --copies once (about distinct questions)."
        )
    say(f"{repeated}. keep: the file is a sample of traffic. once: it is a list of questions.")
    return typer.prompt("copies", type=click.Choice(["keep", "once"]), err=True)


def _read(
    data: Path, columns: from_options.Pairs | None, *, alpha: float, delta: float, copies: Copies | None
) -> QuestionFile:
    """The questions, with a warning if they are too few for the promise whatever the answers."""
    from semgrad_guard.calibration import gates

    questions = from_options.read_data(data, columns, keeps=copies == "keep")
    fewest = gates.fewest_answers(alpha=alpha, delta=gates.share_of(delta, 1))
    if len(questions.rows) < fewest:
        say(
            f"{len(questions.rows)} questions cannot keep this promise, whatever the answers: it takes at least "
            f"{fewest}.",
            label="Warning",
        )
    return questions


def _drawn_questions(questions: QuestionFile, count: int) -> QuestionFile:
    """A random part of the questions, of traffic with their repetitions; a hash of the questions draws."""
    times = questions.times or [1] * len(questions.rows)
    draws = [(row, number) for row, most in enumerate(times) for number in range(most)]
    if len(draws) <= count:
        return questions
    ranks = {draw: hashlib.sha256(f"{draw[1]} {questions.rows[draw[0]].key}".encode()).digest() for draw in draws}
    drawn = Counter(row for row, _ in sorted(draws, key=ranks.__getitem__)[:count])
    note(
        f"{count} of {len(draws)} questions are put to the model, a random part: people grade every sentence of their "
        "answers. --by-hand takes another number."
    )
    rows = sorted(drawn)
    kept = [questions.rows[row] for row in rows]
    return replace(questions, rows=kept, times=tuple(drawn[row] for row in rows) if questions.times else ())


def gate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    calibration: Path,
    band: Path,
    record: bool = False,
    column: from_options.Pairs | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
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
    from semgrad_guard.paper.coverage import Band, digest

    one_from_stdin(data=data, prompt=prompt, system=system)
    source = from_options.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(band)  # the answers are next to the band until the command ends
    phrasing, sources = from_options.phrasing(prompt, system)
    made = [Output(band, "band", read_by(Band.load))] if record else []
    files.require(*made, inputs=[data, calibration, Path(model), *sources, *([] if record else [band])])
    recorded = None if record else Band.load(band)
    rows = from_options.read_data(data, column, strict=True).rows
    phrasing.require(rows)
    policy = cast("Policy", from_options.load_policy(calibration, on_no_threshold))
    graders = grading.load_graders([] if grader is None else [grader])
    writer = writer_for(
        policy,
        source,
        from_options.server_of(engine),
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
    from semgrad_guard.cli.drafting import ModelWriter, ServerWriter
    from semgrad_guard.guard import estimator_of
    from semgrad_guard.guard.reported import ReportedScorer

    bound = policy.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits. Calibrate again.")
    if server is None:
        estimator = estimator_of(policy.calibration)
        named = {estimator.name: estimator}
        writer = ModelWriter(
            from_options.load(source), named, template, decoding, phrasing, on_cut=policy.on_cut or "score"
        )
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
    from semgrad_guard.paper.coverage import Measured, decided, digest

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
