"""The rows of a run's record: an answered question with its scores, and everything that an evaluation keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field

from semgrad_guard.guard.cut_answers import why_unscored
from semgrad_guard.questions.data import Question
from semgrad_guard.settings import OnCut


class AnswerScore(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The number of one estimator for an answer; None, with a reason, if it has none.

    `features` are the input of a learned estimator, kept so that it can be fitted on graded answers.
    """

    uncertainty: float | None
    reason: str | None = None
    features: dict[str, float] | None = None


class AnsweredSentence(BaseModel, frozen=True, extra="forbid"):
    """A sentence of an answer, text[start:end], with its scores; `leans_on` is the number of an earlier one."""

    start: int
    end: int
    leans_on: int | None = None
    scores: dict[str, AnswerScore]


class Answer(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One answered question. `key` is the question's; `text` is None where the question does not fit the window.

    By sentence, `sentences` are those of the text (none where they have no scores), and `scores` hold the most doubtful
    one's; None: the answer was scored as a whole.
    """

    key: str
    id: str | None = None
    question: str
    text: str | None
    finish_reason: str | None = None
    scores: dict[str, AnswerScore]
    sentences: tuple[AnsweredSentence, ...] | None = None

    @classmethod
    def to(cls, question: Question, **fields: Any) -> Self:
        """The answer to a question, with these fields."""
        return cls(key=question.key, id=question.id, question=question.question, **fields)

    def uncertainty(self, estimator: str) -> float | None:
        """The number of the estimator that has this name in the run."""
        return self.scores[estimator].uncertainty

    @property
    def is_cut(self) -> bool:
        """Whether a limit cut it off (`max_tokens`)."""
        return self.finish_reason == "length"

    def judged(self, on_cut: OnCut) -> Self:
        """The answer with the scores that count for a guard with this rule about answers that a limit cut off."""
        by_sentence = bool(self.sentences)
        why = why_unscored(self.text or "", on_cut, by_sentence=by_sentence) if self.is_cut and self.text else None
        if why is None:
            return self
        scores = dict.fromkeys(self.scores, AnswerScore(uncertainty=None, reason=why))
        parts = self.sentences
        if parts:
            parts = (*parts[:-1], parts[-1].model_copy(update={"scores": scores}))
        return self.model_copy(update={"scores": scores, "sentences": parts})

    @property
    def sentence_keys(self) -> list[str]:
        """The names of its sentences, as a sheet of labels has them."""
        return [f"{self.key}.{number}" for number in range(1, len(self.sentences or ()) + 1)]

    @property
    def sentence_texts(self) -> list[str]:
        """Its sentences, without white space around them."""
        return [(self.text or "")[one.start : one.end].strip() for one in self.sentences or ()]

    @property
    def unscored(self) -> str | None:
        """Why no estimator could score it; None if one has."""
        scored = (self.scores, *(sentence.scores for sentence in self.sentences or ()))
        if any(score.uncertainty is not None or score.features for scores in scored for score in scores.values()):
            return None
        return next((score.reason for score in self.scores.values() if score.reason), None)


class SampleSet(BaseModel, frozen=True, extra="forbid"):
    """The samples that a plan drew: their texts, and the log-probability of each of their tokens (nats).

    The probabilities are those of logits divided by `temperature`, as the methods that share the plan read them.
    """

    plan: dict[str, Any]
    temperature: float = 1.0
    texts: tuple[str, ...]
    log_probs: tuple[tuple[float | None, ...], ...]


class EvaluatedAnswer(Answer, frozen=True):
    """An answer with its references, its tokens, and the score and cost of every method.

    `entropies` and `log_probs` (nats) have one entry per token of `token_ids`. `generation_ms` is the time of plain
    generation (that of the batch, divided by its `rows`), `milliseconds` is the additional cost of each method: all
    that it needs, even if another method had computed it already. `ablations` are variants of SemGrad,
    by name. A row that is a sentence of an answer has that one's key in `part_of`.
    """

    references: tuple[str, ...] = ()
    kind: str | None = None
    context: str | None = None
    token_ids: tuple[int, ...] = ()
    entropies: tuple[float, ...] = ()
    log_probs: tuple[float, ...] = ()
    rows: int = 1
    generation_ms: float = 0.0
    milliseconds: Mapping[str, float] = Field(default_factory=dict[str, float])
    ablations: Mapping[str, float | None] = Field(default_factory=dict[str, float | None])
    samples: tuple[SampleSet, ...] = ()
    part_of: str | None = None

    @classmethod
    def to(cls, question: Question, **fields: Any) -> Self:
        """The answer to a question, with what the question is graded by, and these fields."""
        given = {"references": question.answers, "kind": question.kind, "context": question.context}
        return super().to(question, **given, **fields)

    @property
    def rows_by_sentence(self) -> list[EvaluatedAnswer]:
        """A row for each of its sentences, in its place; itself where it was scored as a whole."""
        if self.sentences is None:
            return [self]
        return [
            self.model_copy(
                update={"key": key, "part_of": self.key, "text": text, "scores": one.scores, "sentences": None}
            )
            for key, text, one in zip(self.sentence_keys, self.sentence_texts, self.sentences, strict=True)
        ]

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the token entropies in nats, None without any."""
        return sum(self.entropies) / len(self.entropies) if self.entropies else None
