"""The work of `score`: whole texts, or their sentences or clauses, scored; a line of JSON for each text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer

from semgrad_guard.calibration import Drift, drift
from semgrad_guard.cli.estimators import EstimatorSpec
from semgrad_guard.cli.loading import Cluster, spreading
from semgrad_guard.cli.rendering import ROWS_SHOWN, claims_view, drift_line, scores_view, verdict_view
from semgrad_guard.cli.terminal import OUT, kept_on_interrupt, note, progress, say, say_problems
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scoring.segments import Segment
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import InputError, PromptTooLongError, ReasoningError
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.evaluation.highlight import Claim
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.scoring import ScoredText, TextScorer, score_kept, score_record
from semgrad_guard.files import atomic_write
from semgrad_guard.guard import Policy
from semgrad_guard.guard.sentences import watched_score
from semgrad_guard.loading import ModelSource
from semgrad_guard.records import Verdict

Scored = tuple[Question, list[Segment]]
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
    rows: Sequence[Question],
    scorer: TextScorer,
    *,
    batch_size: int,
    kept: Path | None,
    cluster: Cluster,
    source: ModelSource,
) -> list[ScoredText]:
    """The scored texts; with `kept`, the record of a resumable run, by a cluster's workers."""
    if kept is not None:
        with (
            kept_on_interrupt("Scoring", f"scores are kept in {kept}") as tell,
            spreading(cluster, scorer.model, source, scorer.recipe) as spread,
        ):
            return score_kept(rows, kept, scorer, spread=spread, batch_size=batch_size, on_progress=tell)
    texts: list[ScoredText] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for start in range(0, len(rows), batch_size):
            texts += scorer(rows[start : start + batch_size])
            tell(len(texts), len(rows))
    return texts


def drift_of(scored: Sequence[tuple[Question, Verdict]], policy: Policy | None) -> Drift | None:
    """Whether the scores have moved since the calibration; None without one that has scores."""
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
    """Score the sentences or clauses of every text, and show them.

    The result are warnings about texts without numbers: those left out, and those without a score for any segment.
    """
    scored: list[Scored] = []
    left_out: list[str] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for number, row in enumerate(rows, start=1):
            conversation = phrasing.conversation(row)
            try:
                found = model.score(conversation, row.response or "", by=by, objective=estimator.objective)
            except (PromptTooLongError, ReasoningError) as error:
                left_out.append(f"{row.id or row.question[:60]!r} is left out: {error}")
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
        f"{row.id or row.question[:60]!r} has no score: {_why(segments)}."
        for row, segments in scored
        if all(uncertainty is None for _, uncertainty in _claims(segments, estimator))
    ]
    say_problems(unscored)
    return left_out, unscored


def _why(segments: Sequence[Segment]) -> str:
    reasons = (segment.scores.reason for segment in segments if segment.scores is not None)
    return next((reason for reason in reasons if reason), "no reason is known")


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
    for row, segments in scored[:ROWS_SHOWN]:
        OUT.print(claims_view(row.question, _claims(segments, estimator), estimator=estimator.name))
    if len(scored) > ROWS_SHOWN:
        OUT.print(f"… and {len(scored) - ROWS_SHOWN} more: --output FILE or --json gives them all.")
