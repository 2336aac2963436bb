"""The rows of a decision log: decisions, and feedback on them. Plain data; nothing of a withheld answer. Summaries of
them are counts, rates and coverage, by day and in all.
"""

from __future__ import annotations

import math
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Literal, Protocol, runtime_checkable

from pydantic import AwareDatetime, BaseModel

from semgrad_guard.errors import InputError
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


class Decision(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False):
    """One decision. `at` is UTC, `seconds` is the time from the call to the decision. Without `enforced`, `action` is
    advice, and `delivery` is what happened to the answer.

    `delivered` and `question` are texts, which only a log that keeps text has; `delivered` is the text that was sent,
    never a withheld draft. `tokens` counts the scored tokens of a delivered answer. `alpha` and `delta` are the promise
    of the calibration; `drawn` is when the decision was drawn at random to be graded. `sentences` are those of an
    answer that was judged by sentence, with their ranges in the delivered text.
    """

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


class Feedback(BaseModel, frozen=True, extra="ignore"):
    """Whether a delivered answer was right, and why it was graded. The latest feedback counts.

    `note` tells in words what the feedback does not count for, and how it differs from earlier feedback. The log does
    not keep it.
    """

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


_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

Row = tuple[Decision, Feedback | None]


class Graded(BaseModel, frozen=True):
    """The grades of delivered answers that were graded for one reason."""

    right: int = 0
    wrong: int = 0


class Summary(BaseModel, frozen=True):
    """Decisions of one time, by delivery. `coverage` is the share whose own answer was delivered.

    `flagged` are those among them that were delivered because nothing was enforced (`annotate`): the advice
    was to withhold or to escalate them. `feedback` is by the reason of grading.
    """

    label: str
    decisions: int
    answer: int
    escalate: int
    abstain: int
    flagged: int
    unscored: int
    promised: int
    drifted: int
    coverage: float | None
    median_uncertainty: float | None
    median_seconds: float | None
    feedback: dict[str, Graded]

    @classmethod
    def of(cls, label: str, rows: Sequence[Row], *, withheld: bool = True) -> Summary:
        """Of these decisions; without `withheld`, scores and times are those of delivered answers."""
        made = [decision for decision, _ in rows]
        shown = [decision for decision in made if withheld or decision.shows_draft]
        actions = Counter(decision.delivery for decision in made)
        return cls(
            label=label,
            decisions=len(made),
            answer=actions["answer"],
            escalate=actions["escalate"],
            abstain=actions["abstain"],
            flagged=sum(decision.action != decision.delivery for decision in made),
            unscored=sum(decision.uncertainty is None for decision in shown),
            promised=sum(decision.promised for decision in made),
            drifted=sum(bool(decision.drift) for decision in shown),
            coverage=actions["answer"] / len(made) if made else None,
            median_uncertainty=_median(decision.uncertainty for decision in shown),
            median_seconds=_median(decision.seconds for decision in shown),
            feedback=_graded(feedback for _, feedback in rows if feedback is not None),
        )


def by_day(rows: Sequence[Row], *, withheld: bool = True) -> list[Summary]:
    """One summary for each day (UTC) that has decisions, the first day first; `withheld` as for `Summary.of`."""
    days: dict[str, list[Row]] = {}
    for row in rows:
        days.setdefault(row[0].at.astimezone(UTC).date().isoformat(), []).append(row)
    return [Summary.of(day, days[day], withheld=withheld) for day in sorted(days)]


def parse_since(text: str, *, now: datetime | None = None) -> datetime:
    """A moment: "7d", "12h", "30m", "2w" before now, or an ISO date or time (UTC where it names no zone).

    Raises:
        InputError: it is neither.
    """
    now = now or datetime.now(UTC)
    try:
        if found := re.fullmatch(r"(\d{1,6})([mhdw])", text.strip()):
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{text[:40]!r} is not a time: write 7d, 12h, 30m or 2026-01-31").about(
            "since", "until"
        ) from error


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def _graded(entries: Iterable[Feedback]) -> dict[str, Graded]:
    counts: dict[str, Counter[bool]] = {}
    for entry in entries:
        counts.setdefault(entry.sampling, Counter())[entry.right] += 1
    return {way: Graded(right=count[True], wrong=count[False]) for way, count in sorted(counts.items())}
