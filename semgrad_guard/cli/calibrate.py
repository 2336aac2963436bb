"""`semgrad-guard calibrate`: answer, score and grade questions; find the threshold that keeps a promise."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.command import ExitCode, code_of_run
from semgrad_guard.cli.options import LearnedEstimatorSpec, PromisedSentences, estimators_for, learns
from semgrad_guard.cli.terminal import ERR, note, say
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import InputError
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import QuestionFile
from semgrad_guard.questions.data_files import Output, read_by, sole_writer
from semgrad_guard.settings import REPORTED, UPSTREAM_KEY, Alpha, Delta, EngineOptions

if TYPE_CHECKING:
    from semgrad_guard.calibration.calibration_set import Copies


def calibrate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Annotated[
        Path,
        Option(
            'A file or folder of JSON Lines, JSON, CSV or Parquet with "question" and "answers"; "-" is stdin, '
            '"pocket" are questions about the embedded model\'s world.',
            options.DATA,
            "FILE",
            reads="stream",
        ),
    ],
    output: Annotated[Path, Option("Where to save the calibration.", options.DATA, "FILE")],
    model: EngineOptions,
    alpha: Alpha = 0.1,
    delta: Delta = 0.1,
    copies: Annotated[
        Literal["keep", "once"] | None,
        Option(
            "Questions that the file repeats: keep them where it is a sample of traffic, in which popular ones repeat; "
            "count them once where it is a list of questions.",
            options.DATA,
            "keep|once",
            shown="asks",
        ),
    ] = None,
    grader: Annotated[
        str | None,
        options.grader_option(
            "What counts as correct: contains (a reference is asserted), exact-match, token-f1 (at least 0.5), "
            "rouge-l (at least 0.3), nli=MODEL, bem=MODEL or judge=PROVIDER:MODEL. contains+judge=... hands the judge "
            "the answers on which contains comes to no verdict.",
        ),
    ] = None,
    labels: options.Labels = None,
    by_hand: Annotated[
        int,
        Option(
            "How many answers people grade (--labels). Where there are more, they are a random part of the surest "
            "ones; an estimator that learns from labels takes all.",
            options.GRADING,
            "N",
            Bounds(1, 1_000_000),
        ),
    ] = 100,
    estimator: LearnedEstimatorSpec,
    answers: Annotated[
        Path | None,
        Option(
            "The record of the run, which an interrupted run continues.", options.DATA, "FILE", shown="next to output"
        ),
    ] = None,
    batch_size: options.BatchSize = 8,
    decoding: options.Decoding,
    wording: options.Wording,
    columns: options.AnsweredColumns,
    probe: options.ProbeFile = None,
    plot: Annotated[Path | None, Option("Draw risk against coverage (.png, .svg, .pdf).", options.DATA, "FILE")] = None,
    sentences: PromisedSentences,
    upstream: Annotated[
        str | None,
        Option(
            "Id of the stage before, if these are the questions that it did not let through.",
            options.DECISION,
            "ID",
            reads="calibration_id",
        ),
    ] = None,
    server: Annotated[
        str | None,
        Option(
            "A server with OpenAI's protocol that answers (http://localhost:11434/v1); --model is then its name for "
            f"the model, and --estimator one of {', '.join(REPORTED)}, by the log-probabilities that it reports. Its "
            f"key stands in the environment, {UPSTREAM_KEY}.",
            options.DATA,
            "URL",
        ),
    ] = None,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the threshold that keeps a promise: among the answers let through, at most alpha are wrong.

    The model answers every question of the file, the estimator scores the answers, the grader compares them with the
    references. The promise holds with probability 1 - delta, for questions drawn like those of the file and put in
    the same way: give the system message, the prompt and the passages that your program sends. If no threshold keeps
    it, the command says so and what would help. An estimator that learns from labels (states, fused, auto) does so on a
    quarter of the answers, and the threshold is chosen on the rest. With --by sentence, every sentence has a score and
    a grade of its own, and the promise is about sentences.
    """
    from semgrad_guard.calibration import Calibration
    from semgrad_guard.cli import grading
    from semgrad_guard.cli.rendering import draw_calibration, show_calibration

    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system, labels=labels)
    promised = sentences.form()
    files = grading.Files(output, answers, plot, labels)
    phrasing, sources = loading.phrasing(wording)
    given = [] if probe is None else [probe]
    written = Output(output, "calibration", read_by(Calibration.load))
    files.require(written, inputs=[data, Path(model.model), *sources, *given])
    questions = _read(data, columns, strict=strict, alpha=alpha, delta=delta, copies=copies)
    from semgrad_guard.cli.calibrate_answers import require_at_server
    from semgrad_guard.cli.calibrate_run import Run  # torch loads here, once the files are known to be good
    from semgrad_guard.guard.calibrated_estimator import require_by_sentence

    if copies is None and questions.duplicates:
        copies = _chosen(questions)
    if copies == "keep" and questions.times and decoding.temperature > 0:
        raise InputError("--copies keep takes greedy answers: --temperature 0")
    few = labels is not None and not learns(estimator)
    questions = _drawn_questions(questions, by_hand) if promised and few else questions
    drawn = by_hand if few and len(questions.rows) > by_hand else None
    known = estimators_for(estimator) if server is None else ()  # before any work, also settings that they do not take
    for one in known if promised else ():
        require_by_sentence(one)
    graders = grading.load_graders([] if grader is None else [grader])
    grading.check_labels(labels, begun_at=labels)
    source = ModelSource(**vars(model), semantic_token=None if server is not None else loading.load_token(probe))
    if server is not None:
        require_at_server(model, probe=probe)
    run = Run(
        source=source,
        estimator=estimator,
        phrasing=phrasing,
        decoding=loading.decoding(decoding),
        batch_size=batch_size,
        by_hand=drawn,
        server=server,
        sentences=promised,
        graders=graders,
        alpha=alpha,
        delta=delta,
        upstream=upstream,
        copies=copies,
    )
    with sole_writer(output):
        outcome = run(questions, files)
        if (choice := outcome.calibration.choice) is not None:
            # An estimator other than the requested one is more than a note.
            tell = note if choice.asked in ("auto", choice.estimator) else say
            tell(choice.reason, label=choice.estimator)
        outcome.calibration.save(output)
        if plot is not None:
            draw_calibration(plot, outcome)
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
    data: Path,
    columns: options.Columns,
    *,
    strict: bool,
    alpha: float,
    delta: float,
    copies: Copies | None,
) -> QuestionFile:
    """The questions, with a warning if they are too few for the promise whatever the answers."""
    from semgrad_guard.calibration import gates

    questions = loading.read_data(data, columns, strict=strict, keeps=copies == "keep")
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
