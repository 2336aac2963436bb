"""`semgrad-guard score`: how uncertain a model is of texts that came from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semgrad_guard.cli import loading, options, scores_file, values
from semgrad_guard.cli.estimators import EstimatorSpec
from semgrad_guard.cli.help import ExitCode
from semgrad_guard.cli.loading import Cluster, spreading
from semgrad_guard.cli.terminal import OUT, kept_on_interrupt, progress, say, say_problems
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import EmptyPromptError, EmptyResponseError, InputError
from semgrad_guard.evaluation.files import Output, require_outputs, sole_writer
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.loading import ModelSource
from semgrad_guard.records import Verdict
from semgrad_guard.settings import ModelOptions

if TYPE_CHECKING:
    from semgrad_guard.calibration import Drift
    from semgrad_guard.evaluation.runs.scoring import ScoredText, TextScorer
    from semgrad_guard.guard import Policy

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
    written = [] if output is None else [Output(output, "file of scores", scores_file.are_scores)]
    require_outputs(written, inputs=[*given, *sources])
    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system, question=question, response=response)
    rows, problems = _rows(data, question, response, columns=columns, strict=strict)
    phrasing.require(rows)
    source = ModelSource(**vars(model), semantic_token=loading.load_token(probe))
    with nullcontext() if output is None else sole_writer(output):
        if parts is not None:
            from semgrad_guard.cli import claims

            chosen = claims.replay_estimator(estimator)
            found = claims.score_claims(
                rows, loading.load(source), chosen, by=parts, phrasing=phrasing, output=output, as_json=as_json
            )
            raise typer.Exit(_code(found.left_out or problems, found.unscored))
        policy = loading.load_policy(calibration)
        estimate = estimator.make(policy)
        on_doubt = None if policy is None else judged_by(policy.calibration, "sentence" if by else None, None)
        scorer = TextScorer(loading.load(source), estimate, policy, phrasing, on_doubt)
        if cluster.ray and output is not None:
            texts = _score_spread(
                rows,
                scorer,
                batch_size=batch_size,
                record=scores_file.record(output),
                cluster=cluster,
                source=source,
            )
        else:
            texts = _score(rows, scorer, batch_size)
        scored = [(row, text.verdict) for row, text in zip(rows, texts, strict=True) if text.verdict is not None]
        left_out = [too_long(row, text.too_long) for row, text in zip(rows, texts, strict=True) if text.too_long]
        say_problems(left_out)
        if not scored:
            raise InputError("none of the texts could be scored")
        moved = _drift(scored, policy) if data is not None else None
        if moved is not None:
            scored = [(row, verdict.model_copy(update={"drift": moved.moved})) for row, verdict in scored]
        _deliver(scored, moved, output, as_json=as_json, decided=policy is not None, single=data is None)
        if cluster.ray and output is not None:
            scores_file.record(output).unlink(missing_ok=True)
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


def _score(rows: Sequence[Question], scorer: TextScorer, batch_size: int) -> list[ScoredText]:
    texts: list[ScoredText] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for start in range(0, len(rows), batch_size):
            texts += scorer(rows[start : start + batch_size])
            tell(len(texts), len(rows))
    return texts


def _score_spread(
    rows: Sequence[Question],
    scorer: TextScorer,
    *,
    batch_size: int,
    record: Path,
    cluster: Cluster,
    source: ModelSource,
) -> list[ScoredText]:
    """The same by a cluster's workers; Ctrl-C tells how many are kept, and how to resume."""
    from semgrad_guard.evaluation.runs.scoring import score_kept

    with (
        kept_on_interrupt("Scoring", f"scores are kept in {record}") as tell,
        spreading(cluster, scorer.model, source, scorer.recipe) as spread,
    ):
        return score_kept(rows, record, scorer, spread=spread, batch_size=batch_size, on_progress=tell)


def _drift(scored: Sequence[tuple[Question, Verdict]], policy: Policy | None) -> Drift | None:
    from semgrad_guard.calibration import drift
    from semgrad_guard.guard.sentences import watched_score

    if policy is None or policy.calibration is None or not policy.calibration.scores:
        return None
    return drift([watched_score(verdict) for _, verdict in scored], policy.calibration.scores)


def _deliver(
    scored: Sequence[tuple[Question, Verdict]],
    found: Drift | None,
    output: Path | None,
    *,
    as_json: bool,
    decided: bool,
    single: bool,
) -> None:
    from semgrad_guard.cli.rendering import drift_line, scores_view, verdict_view
    from semgrad_guard.evaluation.runs.scoring import score_record

    scores_file.deliver([score_record(row, verdict) for row, verdict in scored], output, as_json=as_json)
    if as_json:
        pass
    elif single:
        OUT.print(verdict_view(scored[0][1]))
    else:
        OUT.print(scores_view([(row.question, verdict) for row, verdict in scored], decided=decided))
    if found is not None and (as_json or found.moved):
        say(drift_line(found))
    elif found is not None:
        OUT.print(drift_line(found))
