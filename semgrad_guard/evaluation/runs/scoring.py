"""Texts from anywhere, scored and decided about, batch by batch: the work of `score`, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.evaluation.job_record import JobRecord, Progress
from semgrad_guard.evaluation.questions.data import Question, identity
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.run import Spread, complete, in_turn
from semgrad_guard.guard import Policy, assess, settle, unscored
from semgrad_guard.guard.policy import lets_every_score_through
from semgrad_guard.records import PromptForm, Verdict

Scored = tuple[Question, Verdict]


@dataclass(frozen=True)
class ScoredBatch:
    """The rows of a batch with their verdicts, in order; and those that do not fit the context window, with why."""

    scored: Sequence[Scored]
    too_long: Sequence[tuple[Question, PromptTooLongError]]


@dataclass(frozen=True)
class TextScorer:
    """How texts are scored and decided about. Everything but the model is plain data, to be sent to other processes."""

    model: LanguageModel
    estimator: Estimator
    policy: Policy | None = None
    phrasing: Phrasing = field(default_factory=Phrasing)

    def __call__(self, rows: Sequence[Question]) -> ScoredBatch:
        """The rows with their verdicts, from one backward pass for all of them."""
        fitting: list[tuple[Question, Evidence]] = []
        too_long: list[tuple[Question, PromptTooLongError]] = []
        for row in rows:
            try:
                fitting.append((row, self.model.evidence(self.phrasing.conversation(row), row.response or "")))
            except PromptTooLongError as error:
                too_long.append((row, error))
        together = BatchScoring.joined([evidence for _, evidence in fitting]).evidence if fitting else ()
        scored = [(row, self._verdict(row, evidence)) for (row, _), evidence in zip(fitting, together, strict=True)]
        return ScoredBatch(scored, too_long)

    def _verdict(self, row: Question, evidence: Evidence) -> Verdict:
        template = self.phrasing.name([row])
        draft = assess(self.model, self.estimator, evidence, text=evidence.text, prompt_template=template)
        return self._settled(draft, evidence.prompt.form)

    def unscored(self, text: str, reason: str) -> Verdict:
        """The verdict on a text that cannot be scored."""
        return self._settled(unscored(text, reason=reason, model=self.model.name), None)

    def _settled(self, draft: Verdict, prompt: PromptForm | None) -> Verdict:
        policy = self.policy or lets_every_score_through("abstain")
        return settle(draft, policy, "enforce", can_escalate=False, prompt=prompt).verdict


class ScoredText(BaseModel):
    """A text in the record of a run: its verdict, or why it does not fit the context window."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    verdict: Verdict | None = None
    too_long: str | None = None


@dataclass(frozen=True)
class KeptScoring:
    """A scorer whose results can be kept in the record of a run."""

    score: TextScorer

    def __call__(self, rows: Sequence[Question], start: int) -> list[ScoredText]:
        """The texts of a batch, in its order."""
        del start  # texts that are there already draw nothing from a seed
        found = self.score(rows)
        verdicts = {id(row): verdict for row, verdict in found.scored}
        reasons = {id(row): str(error) for row, error in found.too_long}
        return [
            ScoredText(key=text_key(row), verdict=verdicts.get(id(row)), too_long=reasons.get(id(row))) for row in rows
        ]


@dataclass(frozen=True)
class ScoringRecipe:
    """Turns a worker's model into a scorer; plain data."""

    estimator: Estimator
    policy: Policy | None
    phrasing: Phrasing

    def __call__(self, model: LanguageModel) -> KeptScoring:
        """The scorer with this model."""
        return KeptScoring(TextScorer(model, self.estimator, self.policy, self.phrasing))


def text_key(row: Question) -> str:
    """The name of a text in a run, from question and response."""
    return identity(row, "response")


def score_kept(
    rows: Sequence[Question],
    path: Path,
    scorer: TextScorer,
    *,
    spread: Spread[ScoredText] | None,
    batch_size: int,
    on_progress: Progress | None = None,
) -> ScoredBatch:
    """Score the texts, keeping all as they come in the record at `path`; recorded texts are not redone.

    Raises:
        BindingMismatchError: the record belongs to a run with other settings.
        InputError: it cannot be written, or is not such a record.
    """
    with JobRecord(path, _settings(scorer, batch_size), ScoredText, kind="scores") as record:
        spread = spread or in_turn(KeptScoring(scorer))
        found = complete(record, rows, spread, batch_size=batch_size, key=text_key, on_progress=on_progress)
    pairs = list(zip(rows, found, strict=True))
    return ScoredBatch(
        [(row, result.verdict) for row, result in pairs if result.verdict is not None],
        [(row, PromptTooLongError(result.too_long)) for row, result in pairs if result.too_long is not None],
    )


def _settings(scorer: TextScorer, batch_size: int) -> dict[str, Any]:
    """Everything that the numbers depend on, to their last digits."""
    calibration = None if scorer.policy is None else scorer.policy.calibration
    return {
        "model": asdict(scorer.model.identity),
        "estimator": {"name": scorer.estimator.name, **scorer.estimator.settings()},
        "calibration": None if calibration is None else calibration.id,
        "prompt": scorer.phrasing.settings(),
        "batch_size": batch_size,
    }


def score_record(row: Question, verdict: Verdict) -> dict[str, object]:
    """The line of a text in the output of `score`: plain JSON types."""
    return {"id": row.id, "question": row.question, "response": row.response, **verdict.metadata()}


def left_out(row: Question, error: PromptTooLongError) -> str:
    """The warning about a text that does not fit the context window."""
    return f"{_name(row)} is left out: {error}"


def no_score(row: Question, verdict: Verdict) -> str:
    """The warning about a text without a score."""
    return f"{_name(row)} has no score: {verdict.reason or 'no reason is known'}."


def _name(row: Question) -> str:
    return repr(row.id or row.question[:60])
