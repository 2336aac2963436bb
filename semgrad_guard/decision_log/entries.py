"""The rows of a decision log: decisions and feedback on them. Plain data; nothing of an answer that was withheld."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter

from semgrad_guard.decision_log.sink import Facts
from semgrad_guard.records import Action, Status, Verdict, delivery_of

Sampling = Literal["user", "random", "all", "uncertain"]
"""How an answer came to be graded: somebody chose to; drawn at random; all were; because it was uncertain."""


class Decision(BaseModel):
    """One decision. `at` is UTC, `seconds` is the time from the call to the decision. Without `enforced`, `action` is
    advice: `delivery` is what became of the answer.

    `delivered` and `question` are texts, which only a log that keeps text has; `delivered` is what went out, never a
    withheld draft. `tokens` are those that were scored of a delivered answer.
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

    @property
    def delivery(self) -> Action:
        """What became of the answer."""
        return delivery_of(self.action, enforced=self.enforced)

    @property
    def shows_draft(self) -> bool:
        """Whether what was delivered is the answer that the score belongs to."""
        return self.escalated_to is None and self.delivery == "answer"

    def without_score(self) -> Decision:
        """The decision without what its draft tells: the score, what follows from it, and the times it took."""
        untold = ("uncertainty", "confidence", "reason", "drift", "tokens", "seconds", "scoring_ms")
        return self.model_copy(update={"status": "unscored", **dict.fromkeys(untold)})

    @classmethod
    def of(cls, verdict: Verdict, *, seconds: float | None, facts: Facts, text: bool) -> Decision:
        """The row of a verdict, with a new id; with texts if `text`."""
        return cls(
            id=f"dec_{secrets.token_hex(12)}",
            at=datetime.now(UTC),
            request_id=facts.request_id,
            served=facts.served,
            model=verdict.model,
            estimator=verdict.estimator,
            calibration_id=verdict.calibration_id,
            action=verdict.action,
            enforced=verdict.enforced,
            promised=verdict.promised,
            status=verdict.status,
            uncertainty=verdict.uncertainty,
            confidence=verdict.confidence,
            threshold=verdict.threshold,
            reason=verdict.reason,
            drift=verdict.drift,
            tokens=verdict.scored_tokens if verdict.shows_draft else None,
            seconds=seconds,
            scoring_ms=verdict.scoring_ms,
            escalated_to=None if verdict.escalated is None else verdict.escalated.model,
            question=_writable(facts.question) if text else None,
            delivered=_writable(verdict.text) if text else None,
        )


class Feedback(BaseModel):
    """Whether a delivered answer was right, and how it came to be graded. What is said last counts."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["feedback"] = "feedback"
    id: str
    at: AwareDatetime
    decision_id: str
    right: bool
    sampling: Sampling
    grader: str | None = None

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


Entry = Annotated[Decision | Feedback, Field(discriminator="kind")]
_ENTRY: TypeAdapter[Decision | Feedback] = TypeAdapter(Entry)


def read_entry(line: bytes) -> Decision | Feedback:
    """An entry as a line of a journal holds it.

    Raises:
        ValueError: the line is none.
    """
    return _ENTRY.validate_json(line)


def _writable(text: str | None) -> str | None:
    """A text as every database takes it: no null characters, no halves of characters."""
    return None if text is None else text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
