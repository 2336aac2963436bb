"""Savings: the requests that an escalation target did not get, and the cost of that, by the decisions of a log.

Three rules. The drafts of escalated requests are a cost, and a withheld answer saves nothing. A sum of money takes a
price that the user gives. And every sum is over whole blocks of 20 requests of one kind, counted from the log's first,
so that no figure, and no difference between two of them, tells of one draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semgrad_guard.records import Action

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
