"""Texts from anywhere, scored and decided about, batch by batch: what `score` computes, in whatever process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import conversation, form_of, prompt_name
from semgrad_guard.guard import Policy, assess, settle
from semgrad_guard.guard.policy import lets_every_score_through
from semgrad_guard.records import Verdict

Scored = tuple[Question, Verdict]


@dataclass(frozen=True)
class ScoredBatch:
    """The rows of a batch with their verdicts, in order; and those that do not fit the context window, with why."""

    scored: Sequence[Scored]
    too_long: Sequence[tuple[Question, PromptTooLongError]]


@dataclass(frozen=True)
class TextScorer:
    """How texts are scored and decided about. What is not the model is plain data, which other processes are sent."""

    model: LanguageModel
    estimator: Estimator
    policy: Policy | None = None
    system: str | None = None

    def __call__(self, rows: Sequence[Question]) -> ScoredBatch:
        """The rows with their verdicts, from one backward pass for all of them."""
        fitting: list[tuple[Question, Evidence]] = []
        too_long: list[tuple[Question, PromptTooLongError]] = []
        for row in rows:
            try:
                fitting.append((row, self._evidence(row)))
            except PromptTooLongError as error:
                too_long.append((row, error))
        together = BatchScoring.joined([each for _, each in fitting]).evidence if fitting else ()
        scored = [(row, self._verdict(row, each)) for (row, _), each in zip(fitting, together, strict=True)]
        return ScoredBatch(scored, too_long)

    def _evidence(self, row: Question) -> Evidence:
        return self.model.evidence(conversation(row.question, row.context, system=self.system), row.response or "")

    def _verdict(self, row: Question, evidence: Evidence) -> Verdict:
        template = prompt_name(form_of([row]), system=self.system)
        draft = assess(self.model, self.estimator, evidence, text=evidence.text, prompt_template=template)
        policy = self.policy or lets_every_score_through("abstain")
        verdict = settle(draft, policy, "enforce", can_escalate=False, prompt=evidence.prompt.form).verdict
        return verdict if self.policy is not None else verdict.model_copy(update={"threshold": None})


def score_record(row: Question, verdict: Verdict) -> dict[str, object]:
    """What `score` writes of a text: plain JSON types."""
    return {"id": row.id, "question": row.question, "response": row.response, **verdict.metadata()}


def left_out(row: Question, error: PromptTooLongError) -> str:
    """What to say of a text that does not fit the context window."""
    return f"{_name(row)} is left out: {error}"


def no_score(row: Question, verdict: Verdict) -> str:
    """What to say of a text without a score."""
    return f"{_name(row)} has no score: {verdict.reason or 'no reason is known'}."


def _name(row: Question) -> str:
    return repr(row.id or row.question[:60])
