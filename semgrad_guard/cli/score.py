"""`semgrad-guard score`: how uncertain a model is of texts that came from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.estimators import EstimatorSpec
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.loading import Cluster
from semgrad_guard.cli.terminal import say_problems
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import EmptyPromptError, EmptyResponseError, InputError
from semgrad_guard.evaluation.files import Output, require_outputs, sole_writer
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.loading import ModelSource
from semgrad_guard.settings import ModelOptions

STDOUT = Path("-")


def score(  # noqa: PLR0913  # a command's options are its arguments
    *,
    data: Annotated[
        Path | None,
        Option(
            'A file or folder of JSON Lines, JSON, CSV or Parquet with "question" and "response", and perhaps '
            '"context", the passage that the text was answered from; "-" is stdin.',
            options.DATA,
            "FILE",
            reads="stream",
        ),
    ] = None,
    question: Annotated[
        str | None, Option('One question, instead of a file; "-" reads it from stdin.', options.DATA, "TEXT")
    ] = None,
    response: Annotated[
        str | None, Option('The text to score as its answer; "-" reads it from stdin.', options.DATA, "TEXT")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            'Write the scores there, as JSON Lines; "-" is stdout, as with --json.',
            options.DATA,
            "FILE",
            reads="stream",
        ),
    ] = None,
    batch_size: Annotated[
        int, Option("Texts scored at once; with --by, one after the other.", options.DATA, "N", Bounds(1, 1_000_000))
    ] = 8,
    model: ModelOptions,
    estimator: EstimatorSpec,
    calibration: options.CalibrationFile = None,
    by: options.By = None,
    probe: options.ProbeFile = None,
    wording: options.Wording,
    columns: options.Columns,
    cluster: Cluster,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Score texts from anywhere: another server, a person, a cache.

    The number tells how uncertain this model is of the text as an answer to the question. With a calibration, every
    text also gets an action, and the scores are compared with the calibration's: have they moved? Use the same system
    message, prompt, examples and passages as the calibration.

    With --by, every sentence or clause has a number of its own; all of them come from one replay. With a calibration by
    sentence, every sentence has an action, and is promised or not.
    """
    from semgrad_guard.cli import score_run as run
    from semgrad_guard.evaluation.runs.scoring import TextScorer, no_score, too_long
    from semgrad_guard.guard import judged_by

    if by == "clause" and calibration is not None:
        raise typer.BadParameter("no calibration is for clauses; give --by sentence, or no --calibration")
    if output == STDOUT:
        output, as_json = None, True
    parts = by if calibration is None else None
    if cluster.ray and (parts is not None or data is None or output is None):
        raise typer.BadParameter(
            "--ray is for whole answers of a file: give --data and --output FILE, next to which everything is kept "
            "as it comes, and no --by without a calibration"
        )
    phrasing, sources = loading.phrasing(wording)
    given = [path for path in (data, calibration, probe, Path(model.model)) if path is not None]
    written = [] if output is None else [Output(output, "file of scores", run.are_scores)]
    require_outputs(written, inputs=[*given, *sources])
    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system, question=question, response=response)
    rows, problems = _rows(data, question, response, columns=columns, strict=strict)
    phrasing.require(rows)
    source = ModelSource(**vars(model), semantic_token=loading.load_token(probe))
    with nullcontext() if output is None else sole_writer(output):
        if parts is not None:
            chosen = run.replay_estimator(estimator)
            left_out, unscored = run.score_parts(
                rows, loading.load(source), chosen, by=parts, phrasing=phrasing, output=output, as_json=as_json
            )
            raise typer.Exit(_code(left_out or problems, unscored))
        policy = loading.load_policy(calibration)
        estimate = estimator.make(policy)
        on_doubt = None if policy is None else judged_by(policy.calibration, "sentence" if by else None, None)
        scorer = TextScorer(loading.load(source), estimate, policy, phrasing, on_doubt)
        kept = output.with_name(f"{output.name}.run") if cluster.ray and output is not None else None
        texts = run.score_texts(rows, scorer, batch_size=batch_size, kept=kept, cluster=cluster, source=source)
        scored = [(row, text.verdict) for row, text in zip(rows, texts, strict=True) if text.verdict is not None]
        left_out = [too_long(row, text.too_long) for row, text in zip(rows, texts, strict=True) if text.too_long]
        say_problems(left_out)
        if not scored:
            raise InputError("none of the texts could be scored")
        moved = run.drift_of(scored, policy) if data is not None else None
        if moved is not None:
            scored = [(row, verdict.model_copy(update={"drift": moved.moved})) for row, verdict in scored]
        run.show_texts(scored, moved, output, as_json=as_json, decided=policy is not None, single=data is None)
        if kept is not None:
            kept.unlink(missing_ok=True)
        unscored = [no_score(row, verdict) for row, verdict in scored if verdict.status != "scored"]
        say_problems(unscored)
        raise typer.Exit(_code(left_out or problems, unscored))


def _code(broken: Sequence[object], unscored: Sequence[object]) -> ExitCode:
    """How the command ends: texts without a score go before lines that are broken."""
    return ExitCode.UNSCORED if unscored else ExitCode.BROKEN_LINES if broken else ExitCode.OK


def _rows(
    data: Path | None, question: str | None, response: str | None, *, columns: options.Columns, strict: bool
) -> tuple[Sequence[Question], Sequence[Exception]]:
    """The rows to score, from a file or from the command line, and the broken lines."""
    if (data is None) == (question is None and response is None) or (question is None) != (response is None):
        raise typer.BadParameter("give --data FILE, or --question and --response together")
    if data is not None:
        found = loading.read_data(data, columns, needs="response", strict=strict)
        return found.rows, found.problems
    question, response = loading.given_text(question or ""), loading.given_text(response or "")
    if not question.strip():
        raise EmptyPromptError("The question is empty; ask something.")
    if not response.strip():
        raise EmptyResponseError("The response is empty; there is nothing to score.")
    return [Question(question=question, response=response)], []
