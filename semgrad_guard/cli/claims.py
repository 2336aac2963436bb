"""`semgrad-guard score --by sentence`: a number for every sentence or clause of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from semgrad_guard.cli import scores_file
from semgrad_guard.cli.estimators import EstimatorSpec
from semgrad_guard.cli.rendering import ROWS_SHOWN, claims_view
from semgrad_guard.cli.terminal import OUT, progress, say_problems
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scoring.segments import Segment
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import InputError, PromptTooLongError, ReasoningError
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.evaluation.highlight import Claim
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing

Scored = tuple["Question", "list[Segment]"]


@dataclass(frozen=True)
class Outcome:
    """Warnings about texts without numbers: those left out, and those without a score for any segment."""

    left_out: Sequence[str]
    unscored: Sequence[str]


def replay_estimator(spec: EstimatorSpec) -> ReplayEstimator:
    """The requested estimator, if it reads its number off a replay: only those know parts of an answer."""
    estimator = spec.make()
    if not isinstance(estimator, ReplayEstimator):
        raise typer.BadParameter(
            f"{estimator.name} compares whole answers; --by needs an estimator of one replay, e.g. hybridgrad"
        )
    return estimator


def score_claims(
    rows: Sequence[Question],
    model: LanguageModel,
    estimator: ReplayEstimator,
    *,
    by: By,
    phrasing: Phrasing,
    output: Path | None,
    as_json: bool,
) -> Outcome:
    """Score and show."""
    scored, failed = _score(rows, model, estimator, by=by, phrasing=phrasing)
    say_problems(failed)
    if not scored:
        raise InputError("none of the texts could be scored")
    scores_file.deliver([_record(text, estimator, by) for text in scored], output, as_json=as_json)
    if not as_json:
        _show(scored, estimator)
    unscored = [
        f"{row.id or row.question[:60]!r} has no score: {_why(segments)}."
        for row, segments in scored
        if all(uncertainty is None for _, uncertainty in _claims(segments, estimator))
    ]
    say_problems(unscored)
    return Outcome(failed, unscored)


def _why(segments: Sequence[Segment]) -> str:
    reasons = (segment.scores.reason for segment in segments if segment.scores is not None)
    return next((reason for reason in reasons if reason), "no reason is known")


def _score(
    rows: Sequence[Question], model: LanguageModel, estimator: ReplayEstimator, *, by: By, phrasing: Phrasing
) -> tuple[list[Scored], list[str]]:
    scored: list[Scored] = []
    failed: list[str] = []
    with progress("Scoring") as tell:
        tell(0, len(rows))
        for number, row in enumerate(rows, start=1):
            conversation = phrasing.conversation(row)
            try:
                found = model.score(conversation, row.response or "", by=by, objective=estimator.objective)
            except (PromptTooLongError, ReasoningError) as error:
                failed.append(f"{row.id or row.question[:60]!r} is left out: {error}")
            else:
                scored.append((row, found))
            tell(number, len(rows))
    return scored, failed


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
