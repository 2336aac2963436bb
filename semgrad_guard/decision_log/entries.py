"""The rows of a decision log: decisions, and feedback on them. Plain data; nothing of a withheld answer."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol, runtime_checkable

from pydantic import AwareDatetime, BaseModel, ConfigDict

from semgrad_guard.records import Action, SentenceVerdict, Status, Verdict, delivery_of

Sampling = Literal["user", "random", "all", "uncertain"]
"""Why an answer was graded: a user chose to; it was drawn at random; all answers were; it was uncertain."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a decision that its verdict does not have.

    `request_id` names the request, `served` is the name of the model in the request. Only a log that keeps text has the
    `question`. `alpha` and `delta` are those of the calibration.
    """

    request_id: str | None = None
    served: str | None = None
    question: str | None = None
    alpha: float | None = None
    delta: float | None = None


class DecisionSink(Protocol):
    """A log of decisions, as the guard knows it. Called from any thread."""

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        """Write one decision, which took `seconds`, and return its id once it is on the disk.

        None where it could not be written: answers are delivered all the same.
        """
        ...


@runtime_checkable
class FeedbackLog(DecisionSink, Protocol):
    """A log that also takes feedback on its decisions."""

    def feedback(
        self,
        decision_id: str,
        *,
        right: bool,
        sampling: Sampling | None = None,
        grader: str | None = None,
        current: Collection[str] = (),
    ) -> Feedback: ...


_OF_THE_VERDICT = (
    *("model", "estimator", "calibration_id", "action", "enforced", "promised", "status", "uncertainty"),
    *("confidence", "threshold", "reason", "drift", "scoring_ms"),
)
"""The fields of a decision that are its verdict's own."""


class Decision(BaseModel):
    """One decision. `at` is UTC, `seconds` is the time from the call to the decision. Without `enforced`, `action` is
    advice, and `delivery` is what happened to the answer.

    `delivered` and `question` are texts, which only a log that keeps text has; `delivered` is the text that was sent,
    never a withheld draft. `tokens` counts the scored tokens of a delivered answer. `alpha` and `delta` are the promise
    of the calibration; `drawn` is when the decision was drawn at random to be graded. `sentences` are those of an
    answer that was judged by sentence, with their ranges in the delivered text.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    kind: Literal["decision"] = "decision"
    id: str
    at: AwareDatetime
    request_id: str | None = None
    served: str | None = None
    model: str
    estimator: str
    calibration_id: str | None = None
    action: Action
    enforced: bool = True
    promised: bool = False
    status: Status
    uncertainty: float | None = None
    confidence: float | None = None
    threshold: float | None = None
    reason: str | None = None
    drift: bool | None = None
    tokens: int | None = None
    seconds: float | None = None
    scoring_ms: float | None = None
    escalated_to: str | None = None
    question: str | None = None
    delivered: str | None = None
    alpha: float | None = None
    delta: float | None = None
    drawn: AwareDatetime | None = None
    sentences: tuple[SentenceVerdict, ...] | None = None

    @property
    def delivery(self) -> Action:
        """What happened to the answer."""
        return delivery_of(self.action, enforced=self.enforced)

    @property
    def is_promised(self) -> bool:
        """Whether the promise of its calibration is about it: its own answer was delivered by the threshold."""
        return self.promised and self.action == "answer" and self.escalated_to is None

    @property
    def shows_draft(self) -> bool:
        """Whether the delivered text is the whole answer that the score belongs to; a part has no tokens here."""
        return self.escalated_to is None and self.delivery == "answer" and self.tokens is not None

    def without_score(self) -> Decision:
        """The decision without the score of its draft, and without the fields that depend on the draft."""
        hidden = ("uncertainty", "confidence", "reason", "drift", "tokens", "seconds", "scoring_ms", "sentences")
        return self.model_copy(update={"status": "unscored", **dict.fromkeys(hidden)})

    @classmethod
    def of(cls, verdict: Verdict, *, seconds: float | None, facts: Facts, text: bool) -> Decision:
        """The row of a verdict, with a new id; with texts if `text`."""
        return cls(
            id=f"dec_{secrets.token_hex(12)}",
            at=datetime.now(UTC),
            **{name: getattr(verdict, name) for name in _OF_THE_VERDICT},
            request_id=facts.request_id,
            served=facts.served,
            tokens=verdict.scored_tokens if verdict.shows_draft else None,
            seconds=seconds,
            escalated_to=None if verdict.escalated is None else verdict.escalated.model,
            question=_writable(facts.question) if text else None,
            delivered=_writable(verdict.text) if text else None,
            alpha=facts.alpha,
            delta=facts.delta,
            sentences=verdict.sentences or None,
        )


class Feedback(BaseModel):
    """Whether a delivered answer was right, and why it was graded. The latest feedback counts.

    `note` tells in words what the feedback does not count for, and how it differs from earlier feedback. The log does
    not keep it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["feedback"] = "feedback"
    id: str
    at: AwareDatetime
    decision_id: str
    right: bool
    sampling: Sampling
    grader: str | None = None
    note: str | None = None

    @classmethod
    def of(cls, decision_id: str, *, right: bool, sampling: Sampling, grader: str | None = None) -> Feedback:
        """A new entry."""
        return cls(
            id=f"fb_{secrets.token_hex(12)}",
            at=datetime.now(UTC),
            decision_id=decision_id,
            right=right,
            sampling=sampling,
            grader=_writable(grader),
        )


Entry = Decision | Feedback


def _writable(text: str | None) -> str | None:
    """A text without null characters and halves of characters, which databases refuse."""
    return None if text is None else text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
