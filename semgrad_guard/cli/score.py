"""`semgrad-guard score`: how uncertain a model is of texts that came from anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from semgrad_guard.cli import loading, options, values
from semgrad_guard.cli.command import code_of_run
from semgrad_guard.cli.options import EstimatorSpec
from semgrad_guard.cli.terminal import OUT, note, progress, say, say_problems
from semgrad_guard.declared import Bounds, Option
from semgrad_guard.errors import EmptyPromptError, EmptyResponseError, InputError, PromptTooLongError, ReasoningError
from semgrad_guard.files import atomic_write
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.data_files import Output, require_outputs, sole_writer
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.records import Verdict
from semgrad_guard.settings import ModelOptions, OnNoThreshold, PolicyOptions

if TYPE_CHECKING:
    from semgrad_guard.calibration import Drift
    from semgrad_guard.engine.answers.sentences import Segment
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.engine.sentences import By
    from semgrad_guard.estimators.gradients import ReplayEstimator
    from semgrad_guard.guard import Policy
    from semgrad_guard.paper.drawing import Claim
    from semgrad_guard.questions.scoring import ScoredText, TextScorer

    Scored = tuple[Question, list[Segment]]

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
    on_no_threshold: OnNoThreshold = "abstain",
    by: options.By = None,
    probe: options.ProbeFile = None,
    wording: options.Wording,
    columns: options.Columns,
    ray: Annotated[
        bool,
        Option("Score on the cluster to which Ray connects (RAY_ADDRESS), or on one of this machine.", options.CLUSTER),
    ] = False,
    workers: Annotated[
        int | None,
        Option(
            "With --ray: how many processes load the model.",
            options.CLUSTER,
            "N",
            Bounds(1, 1_000_000),
            shown="1",
        ),
    ] = None,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Score texts from anywhere: another server, a person, a cache.

    The number tells how uncertain this model is of the text as an answer to the question. With a calibration, every
    text also gets an action, and the scores are compared with the calibration's: have they moved? Use the same system
    message, prompt, examples and passages as the calibration.

    With --by, every sentence has a number of its own; all of them come from one replay. With a calibration by
    sentence, every sentence has an action, and is promised or not.
    """
    from semgrad_guard.guard import judged_by
    from semgrad_guard.questions.scoring import TextScorer, no_score, too_long

    if output == STDOUT:
        output, as_json = None, True
    parts = by if calibration is None else None
    if workers is not None and not ray:
        raise typer.BadParameter("--workers is for --ray; give both")
    if ray and (parts is not None or data is None):
        raise typer.BadParameter("--ray is for whole answers of a file: give --data, and no --by without a calibration")
    phrasing, sources = loading.phrasing(wording)
    given = [path for path in (data, calibration, probe, Path(model.model)) if path is not None]
    written = [] if output is None else [Output(output, "file of scores", are_scores)]
    require_outputs(written, inputs=[*given, *sources])
    values.one_from_stdin(data=data, prompt=wording.prompt, system=wording.system, question=question, response=response)
    rows, problems = _rows(data, question, response, columns=columns, strict=strict)
    phrasing.require(rows)
    source = ModelSource(**vars(model), semantic_token=loading.load_token(probe))
    with nullcontext() if output is None else sole_writer(output):
        if parts is not None:
            chosen = replay_estimator(estimator)
            left_out, unscored = score_parts(
                rows, loading.load(source), chosen, by=parts, phrasing=phrasing, output=output, as_json=as_json
            )
            raise typer.Exit(code_of_run(unscored=unscored, broken=left_out or problems))
        policy = loading.load_policy(calibration, PolicyOptions(on_no_threshold=on_no_threshold))
        estimate = estimator.make(policy)
        on_doubt = None if policy is None else judged_by(policy.calibration, "sentence" if by else None, None)
        scorer = TextScorer(loading.load(source), estimate, policy, phrasing, on_doubt)
        texts = score_texts(rows, scorer, source, batch_size=batch_size, workers=(workers or 1) if ray else 0)
        scored = [(row, text.verdict) for row, text in zip(rows, texts, strict=True) if text.verdict is not None]
        left_out = [too_long(row, text.too_long) for row, text in zip(rows, texts, strict=True) if text.too_long]
        say_problems(left_out)
        if not scored:
            raise InputError("none of the texts could be scored")
        moved = drift_of(scored, policy) if data is not None else None
        if moved is not None:
            scored = [(row, verdict.model_copy(update={"drift": moved.moved})) for row, verdict in scored]
        show_texts(scored, moved, output, as_json=as_json, decided=policy is not None, single=data is None)
        unscored = [no_score(row, verdict.reason) for row, verdict in scored if verdict.status != "scored"]
        say_problems(unscored)
        raise typer.Exit(code_of_run(unscored=unscored, broken=left_out or problems))


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


_ASKED = {"id", "question", "response"}
_CLAIMS = {*_ASKED, "estimator", "by", "segments"}
"""The fields of a line with --by."""


def are_scores(path: Path) -> bool:
    """Whether a file holds only lines of `score`, and nothing that a user has added."""
    whole = {*_ASKED, "schema", "digest", *Verdict.model_fields}
    for line in path.read_bytes().splitlines():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            return False
        names = set(cast("dict[str, Any]", record)) if isinstance(record, dict) else set[str]()
        if names != _CLAIMS and not {*_ASKED, "digest", "uncertainty", "action"} <= names <= whole:
            return False
    return True


def deliver(records: Iterable[Mapping[str, object]], output: Path | None, *, as_json: bool) -> None:
    """Write the lines to the file, if there is one, and to stdout on request."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    text = "".join(lines)
    if output is not None:
        atomic_write(output, text)
        note(f"{len(lines)} scores are in {output}.", label=None, style="green")
    if as_json:
        typer.echo(text, nl=False)


def score_texts(
    rows: Sequence[Question], scorer: TextScorer, source: ModelSource, *, batch_size: int, workers: int
) -> list[ScoredText]:
    """The scored texts: of this process, or of so many workers of Ray, which load the same model from `source`."""
    texts: list[ScoredText] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        if workers:
            from semgrad_guard.ray.dataset import Scoring
            from semgrad_guard.ray.dataset import score_texts as spread

            given = source.for_workers(scorer.model.identity)
            stated = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(stated) if stated.isdigit() else 1
            scoring = Scoring(given, scorer.estimator, scorer.policy, scorer.phrasing, scorer.by_sentence, threads)
            for text in spread(rows, scoring, batch_size=batch_size, workers=workers):
                texts.append(text)
                tell(len(texts), len(rows))
            return texts
        for start in range(0, len(rows), batch_size):
            texts += scorer(rows[start : start + batch_size])
            tell(len(texts), len(rows))
    return texts


def drift_of(scored: Sequence[tuple[Question, Verdict]], policy: Policy | None) -> Drift | None:
    """Whether the scores have moved since the calibration; None without one that has scores."""
    from semgrad_guard.calibration import drift
    from semgrad_guard.guard.sentences import watched_score

    if policy is None or policy.calibration is None or not policy.calibration.scores:
        return None
    return drift([watched_score(verdict) for _, verdict in scored], policy.calibration.scores)


def show_texts(
    scored: Sequence[tuple[Question, Verdict]],
    moved: Drift | None,
    output: Path | None,
    *,
    as_json: bool,
    decided: bool,
    single: bool,
) -> None:
    """Write and show the scores."""
    from semgrad_guard.cli.rendering import drift_line, scores_view, verdict_view
    from semgrad_guard.questions.scoring import score_record

    deliver([score_record(row, verdict) for row, verdict in scored], output, as_json=as_json)
    if not as_json:
        rows = [(row.question, verdict) for row, verdict in scored]
        OUT.print(verdict_view(scored[0][1]) if single else scores_view(rows, decided=decided))
    if moved is not None and (as_json or moved.moved):
        say(drift_line(moved))
    elif moved is not None:
        OUT.print(drift_line(moved))


def replay_estimator(spec: EstimatorSpec) -> ReplayEstimator:
    """The requested estimator, if it reads its number off a replay: only those know parts of an answer."""
    from semgrad_guard.estimators.gradients import ReplayEstimator

    estimator = spec.make()
    if not isinstance(estimator, ReplayEstimator):
        raise typer.BadParameter(
            f"{estimator.name} compares whole answers; --by needs an estimator of one replay, e.g. hybridgrad"
        )
    return estimator


def score_parts(
    rows: Sequence[Question],
    model: LanguageModel,
    estimator: ReplayEstimator,
    *,
    by: By,
    phrasing: Phrasing,
    output: Path | None,
    as_json: bool,
) -> tuple[list[str], list[str]]:
    """Score the sentences of every text, and show them.

    The result are warnings about texts without numbers: those left out, and those without a score for any segment.
    """
    from semgrad_guard.questions.scoring import no_score, too_long

    scored: list[Scored] = []
    left_out: list[str] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for number, row in enumerate(rows, start=1):
            conversation = phrasing.conversation(row)
            try:
                found = model.score(conversation, row.response or "", by=by, objective=estimator.objective)
            except (PromptTooLongError, ReasoningError) as error:
                left_out.append(too_long(row, str(error)))
            else:
                scored.append((row, found))
            tell(number, len(rows))
    say_problems(left_out)
    if not scored:
        raise InputError("none of the texts could be scored")
    deliver([_record(text, estimator, by) for text in scored], output, as_json=as_json)
    if not as_json:
        _show(scored, estimator)
    unscored = [
        no_score(row, next((one.scores.reason for one in segments if one.scores and one.scores.reason), None))
        for row, segments in scored
        if all(uncertainty is None for _, uncertainty in _claims(segments, estimator))
    ]
    say_problems(unscored)
    return left_out, unscored


def _claims(segments: Sequence[Segment], estimator: ReplayEstimator) -> list[Claim]:
    return [(segment.text, None if segment.scores is None else estimator.value(segment.scores)) for segment in segments]


def _record(scored: Scored, estimator: ReplayEstimator, by: By) -> dict[str, Any]:
    row, segments = scored
    parts = [
        {"text": text, "start": segment.start, "end": segment.end, "uncertainty": uncertainty}
        for segment, (text, uncertainty) in zip(segments, _claims(segments, estimator), strict=True)
    ]
    text = {"id": row.id, "question": row.question, "response": row.response}
    return {**text, "estimator": estimator.name, "by": by, "segments": parts}


def _show(scored: Sequence[Scored], estimator: ReplayEstimator) -> None:
    from semgrad_guard.cli.rendering import ROWS_SHOWN, claims_view

    for row, segments in scored[:ROWS_SHOWN]:
        OUT.print(claims_view(row.question, _claims(segments, estimator), estimator=estimator.name))
    if len(scored) > ROWS_SHOWN:
        OUT.print(f"… and {len(scored) - ROWS_SHOWN} more: --output FILE or --json gives them all.")
