"""Texts from anywhere, scored and decided about, batch by batch: the work of `score`, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Answerer, Policy, Terms, settle, unscored
from semgrad_guard.guard.calibrated_estimator import require_by_sentence
from semgrad_guard.guard.policy import lets_every_score_through
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.records import PromptForm, Verdict
from semgrad_guard.settings import OnDoubt


class ScoredText(BaseModel, frozen=True, extra="forbid"):
    """A text's verdict, or why it does not fit the context window."""

    verdict: Verdict | None = None
    too_long: str | None = None


@dataclass(frozen=True)
class TextScorer:
    """How texts are scored and decided about.

    With `by_sentence`, the action at a doubtful one, every sentence is, and the verdict has the whole text.
    """

    model: LanguageModel
    estimator: Estimator
    policy: Policy | None = None
    phrasing: Phrasing = field(default_factory=Phrasing)
    by_sentence: OnDoubt | None = None

    def __post_init__(self) -> None:
        if self.by_sentence is not None:
            require_by_sentence(self.estimator)

    def __call__(self, rows: Sequence[Question]) -> list[ScoredText]:
        """The texts of a batch, in its order, from one backward pass for all of them."""
        fitting: dict[int, Evidence] = {}
        unread: dict[int, str] = {}
        for i, row in enumerate(rows):
            try:
                fitting[i] = self.model.evidence(self.phrasing.conversation(row), row.response or "")
            except PromptTooLongError as error:
                unread[i] = str(error)
        together = BatchScoring.joined([*fitting.values()]).evidence if fitting else ()
        verdicts = {i: self._verdict(rows[i], evidence) for i, evidence in zip(fitting, together, strict=True)}
        return [ScoredText(verdict=verdicts.get(i), too_long=unread.get(i)) for i in range(len(rows))]

    def unscored(self, text: str, reason: str) -> Verdict:
        """The verdict on a text that cannot be scored."""
        return self._settled(unscored(text, reason=reason, model=self.model.name), None)

    def _verdict(self, row: Question, evidence: Evidence) -> Verdict:
        template = self.phrasing.name([row])
        answerer = Answerer(self.model, self.estimator, prompt_template=template, by_sentence=self.by_sentence)
        return self._settled(answerer.assessed(evidence, evidence.text), evidence.prompt.form)

    def _settled(self, draft: Verdict, prompt: PromptForm | None) -> Verdict:
        policy = self.policy or lets_every_score_through("abstain")
        mode = "enforce" if self.by_sentence is None else "annotate"  # no sentence is left out
        return settle(draft, Terms(policy=policy, mode=mode), prompt=prompt).verdict
