"""`semgrad-guard calibrate`: answer, score and grade questions; find the threshold that keeps a promise."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import typer

from semgrad_guard.cli import loading, options
from semgrad_guard.cli.command import ExitCode, code_of_run
from semgrad_guard.cli.terminal import ERR, note, say
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import NEEDS_LABELS
from semgrad_guard.named import POCKET
from semgrad_guard.questions.data import QuestionFile
from semgrad_guard.questions.data_files import Output, read_by, sole_writer
from semgrad_guard.settings import DtypeName, JudgedBy, OnCut, OnDoubt

if TYPE_CHECKING:
    from semgrad_guard.calibration.calibration_set import Copies


def calibrate(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Path,
    output: Path,
    column: loading.Pairs | None = None,
    copies: Literal["keep", "once"] | None = None,
    model: str = POCKET,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: loading.Pairs | None = None,
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

    options.one_from_stdin(data=data, prompt=prompt, system=system, labels=labels)
    few = labels is not None and estimator not in ("auto", *NEEDS_LABELS)
    if by_hand is not None and not few:
        raise typer.BadParameter(
            "--by-hand is for grades by people: give --labels too, and an estimator that learns nothing from them"
        )
    if labels is not None and grader is not None:
        raise typer.BadParameter(
            "people grade what --labels holds, and --grader would decide nothing: give one of them"
        )
    source = loading.source_of(model, dtype=dtype, device=device, template_option=template_option, engine=engine)
    files = grading.Files(output, labels=labels)
    phrasing, sources = loading.phrasing(prompt, system)
    written = Output(output, "calibration", read_by(Calibration.load))
    files.require(written, inputs=[data, Path(model), *sources])
    questions = _read(data, column, alpha=alpha, delta=delta, copies=copies)
    from semgrad_guard.cli.calibrate_run import Run, estimators_for  # torch loads here, when the files are known
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.guard.calibrated_estimator import require_by_sentence
    from semgrad_guard.guard.policy import judged_by

    if copies is None and questions.duplicates:
        copies = _chosen(questions)
    by_sentence = judged_by(None, by, on_doubt)
    count = by_hand or 100
    questions = _drawn_questions(questions, count) if by_sentence and few else questions
    server = loading.server_of(engine)
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
    data: Path, columns: loading.Pairs | None, *, alpha: float, delta: float, copies: Copies | None
) -> QuestionFile:
    """The questions, with a warning if they are too few for the promise whatever the answers."""
    from semgrad_guard.calibration import gates

    questions = loading.read_data(data, columns, keeps=copies == "keep")
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
