"""The rows of a decision log: decisions, and feedback on them, without a withheld answer; and the savings that they
show.

Savings are the requests that an escalation target did not get, and the cost of that. Three rules. The drafts of
escalated requests are a cost, and a withheld answer saves nothing. A sum of money takes a price that the user gives.
And every sum is over whole blocks of 20 requests of one kind, counted from the log's first, so that no figure, and no
difference between two of them, tells of one draft.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from pydantic import AwareDatetime, BaseModel

from semgrad_guard.errors import InputError
from semgrad_guard.records import Action, SentenceVerdict, Status, Verdict, delivery_of

BLOCK = 20
"""Requests of one kind that are summed together."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Sums over so many `requests` with one action; None where one of them does not have the number.

    `prompt_tokens` and `draft_tokens` are those of this model, `seconds` the time from the call to the decision. The
    target's time is a part of it.
    """

    requests: int = 0
    prompt_tokens: int | None = None
    draft_tokens: int | None = None
    seconds: float | None = None
    target_prompt_tokens: int | None = None
    target_tokens: int | None = None
    target_seconds: float | None = None

    @property
    def own_seconds(self) -> float | None:
        """The time without the target's."""
        if self.seconds is None or self.target_seconds is None:
            return None
        return self.seconds - self.target_seconds


@dataclass(frozen=True)
class Price:
    """A target's price for a million tokens, of prompts and of answers, in any currency."""

    prompt: float
    answer: float


@dataclass(frozen=True)
class Savings:
    """The number of decisions with each action, and the sums over whole blocks of them."""

    counts: Mapping[Action, int]
    spent: Mapping[Action, Spent]

    def words(self, price: Price | None = None) -> list[str]:
        """In sentences; nothing where no answer was escalated, for there was nothing to save."""
        total, here, away = sum(self.counts.values()), self.spent["answer"], self.spent["escalate"]
        if not self.counts["escalate"]:
            return []
        found = [
            f"Of {total} requests {_share(self.counts['answer'], total)} were answered here, "
            f"{_share(self.counts['escalate'], total)} escalated and {_share(self.counts['abstain'], total)} withheld, "
            "which saves nothing."
        ]
        if here.prompt_tokens is not None and here.draft_tokens is not None:
            found.append(
                f"Not sent to the target, of {here.requests} answered here: "
                f"{_tokens(here.prompt_tokens, here.draft_tokens)}, as this model counts them"
                f"{_each(here.seconds, here.requests)}."
            )
            if price is not None:
                saved = (here.prompt_tokens * price.prompt + here.draft_tokens * price.answer) / 1e6
                found.append(f"At {price.prompt:g}/{price.answer:g} for a million tokens that is about {saved:,.2f}.")
        if away.prompt_tokens is not None and away.draft_tokens is not None:
            found.append(
                f"The drafts of {away.requests} escalated requests are a cost: "
                f"{_tokens(away.prompt_tokens, away.draft_tokens)}{_each(away.own_seconds, away.requests)}."
            )
        if away.target_prompt_tokens is not None and away.target_tokens is not None:
            took = _tokens(away.target_prompt_tokens, away.target_tokens)
            found.append(f"The target took {took} for them{_each(away.target_seconds, away.requests)}.")
        return found


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})"


def _tokens(read: int, written: int) -> str:
    return f"{read:,} prompt and {written:,} answer tokens"


def _each(seconds: float | None, requests: int) -> str:
    return "" if seconds is None else f", in {seconds / requests:.2g} s each"


Sampling = Literal["random", "user"]
"""Whether an answer was graded because the log drew it at random, or because a user chose to."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a decision that its verdict does not have.

    `request_id` names the request, `served` is the name of the model in the request. Only a log that keeps text has the
    `question`. `alpha` and `delta` are those of the calibration. `target_seconds` is the escalation target's time.
    """

    request_id: str | None = None
    served: str | None = None
    question: str | None = None
    alpha: float | None = None
    delta: float | None = None
    target_seconds: float | None = None


class DecisionSink(Protocol):
    """A log of decisions, as the guard knows it. Called from any thread."""

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        """Write one decision, which took `seconds`, and return its id once it is on the disk.

        None where it could not be written: answers are delivered all the same.
        """
        ...


_OF_THE_VERDICT = (
    *("model", "estimator", "calibration_id", "action", "enforced", "promised", "status", "uncertainty"),
    *("confidence", "threshold", "reason", "drift", "scoring_ms", "requested_alpha"),
)
"""The fields of a decision that are its verdict's own."""


class Decision(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False):
    """One decision. `at` is UTC, `seconds` is the time from the call to the decision. Without `enforced`, `action` is
    advice, and `delivery` is what happened to the answer.

    `delivered` and `question` are texts, which only a log that keeps text has; `delivered` is the text that was sent,
    never a withheld draft. `tokens` counts the scored tokens of a delivered answer, `draft_tokens` those of the draft,
    whatever became of it. `alpha` and `delta` are the promise of the calibration, `requested_alpha` is the wished one
    where its labels did not support it; `drawn` is when the decision was drawn at random to be graded. `sentences`
    are those of an answer that was judged by sentence, with their ranges in the delivered text.
    """

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
    prompt_tokens: int | None = None
    draft_tokens: int | None = None
    target_prompt_tokens: int | None = None
    target_tokens: int | None = None
    target_seconds: float | None = None
    seconds: float | None = None
    scoring_ms: float | None = None
    escalated_to: str | None = None
    question: str | None = None
    delivered: str | None = None
    alpha: float | None = None
    requested_alpha: float | None = None
    delta: float | None = None
    drawn: AwareDatetime | None = None
    sentences: tuple[SentenceVerdict, ...] | None = None

    @property
    def delivery(self) -> Action:
        """What happened to the answer."""
        return delivery_of(self.action, enforced=self.enforced)

    @property
    def is_part(self) -> bool:
        """Whether some sentences of the answer were withheld, and others delivered."""
        held = [one.action != "deliver" for one in self.sentences or ()]
        return self.delivery == "answer" and self.enforced and any(held) and not all(held)

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
        hidden = (
            *("uncertainty", "confidence", "reason", "drift", "tokens", "seconds", "scoring_ms", "sentences"),
            *("prompt_tokens", "draft_tokens", "target_prompt_tokens", "target_tokens", "target_seconds"),
        )
        return self.model_copy(update={"status": "unscored", **dict.fromkeys(hidden)})

    @classmethod
    def of(cls, verdict: Verdict, *, seconds: float | None, facts: Facts, text: bool) -> Decision:
        """The row of a verdict, with a new id; with texts if `text`."""
        own, target = verdict.details, None if verdict.escalated is None else verdict.escalated.details
        return cls(
            id=f"dec_{secrets.token_hex(12)}",
            at=datetime.now(UTC),
            **{name: value for name, value in verdict.flat.items() if name in _OF_THE_VERDICT},
            request_id=facts.request_id,
            served=facts.served,
            tokens=own.scored_tokens if verdict.shows_draft else None,
            prompt_tokens=own.prompt_tokens,
            draft_tokens=own.scored_tokens,
            target_prompt_tokens=None if target is None else target.prompt_tokens,
            target_tokens=None if target is None else target.answer_tokens or target.scored_tokens or None,
            target_seconds=facts.target_seconds,
            seconds=seconds,
            escalated_to=None if target is None else target.model,
            question=writable(facts.question) if text else None,
            delivered=writable(verdict.text) if text else None,
            alpha=facts.alpha,
            delta=facts.delta,
            sentences=verdict.sentences or None,
        )


class Feedback(BaseModel, frozen=True, extra="ignore"):
    """Whether a delivered answer was right.

    `corrects`: the operator's own command wrote it, so that it takes the place of earlier feedback. `note` tells in
    words what the feedback does not count for, and how it differs from earlier feedback. The log does not keep it.
    """

    id: str
    at: AwareDatetime
    decision_id: str
    right: bool
    sampling: Sampling
    corrects: bool = False
    grader: str | None = None
    note: str | None = None

    def replaces(self, earlier: Feedback) -> bool:
        """Whether it counts in the place of the one that counted before.

        The first grade of a drawn answer counts, and later ones do not; only the operator corrects it.
        """
        return earlier.sampling == "user" or self.corrects


Entry = Decision | Feedback
Row = tuple[Decision, Feedback | None]


def writable(text: str | None) -> str | None:
    """A text without null characters and halves of characters, which databases refuse."""
    return None if text is None else text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_since(text: str, *, now: datetime | None = None) -> datetime:
    """A moment: "7d", "12h", "30m", "2w" before now, or an ISO date or time (UTC where it names no zone).

    Raises:
        InputError: it is neither.
    """
    now = now or datetime.now(UTC)
    try:
        if found := re.fullmatch(r"([0-9]{1,6})([mhdw])", text.strip()):
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{text[:40]!r} is not a time: write 7d, 12h, 30m or 2026-01-31").about(
            "since", "until"
        ) from error
