"""Summaries of a decision log: counts, rates and coverage, by day and in all."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median

from pydantic import BaseModel, ConfigDict

from semgrad_guard.decision_log.entries import Decision, Feedback
from semgrad_guard.errors import InputError

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

Row = tuple[Decision, Feedback | None]


class Graded(BaseModel):
    """The grades of delivered answers that were graded for one reason."""

    model_config = ConfigDict(frozen=True)

    right: int = 0
    wrong: int = 0


class Summary(BaseModel):
    """Decisions of one time, by delivery. `coverage` is the share whose own answer was delivered.

    `flagged` are those among them that were delivered because nothing was enforced (`annotate`, `observe`): the advice
    was to withhold or to escalate them. `feedback` is by the reason of grading.
    """

    model_config = ConfigDict(frozen=True)

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
