"""The score that a policy compares with its threshold, for each sentence of an answer.

A sentence is delivered only with those that it depends on, so it counts with the greatest of their scores. It then
depends on nothing but its own number whether it is delivered, at any threshold: a promise about sentences is about
these numbers, and every front decides by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from semgrad_guard.settings import OnDoubt


def compared_scores(
    scores: Sequence[float | None], leans_on: Sequence[int | None], *, on_doubt: OnDoubt
) -> list[float | None]:
    """The scores that are compared, in the order of the text; None where a sentence can never be delivered.

    `scores` are the sentences' own, None (or not finite) where there is none; `leans_on` is the number of the earlier
    one that a sentence leans on ("It is ..."). Under `stop` and `escalate` a sentence depends on all before it, under
    `drop` on those that it leans on, and under `mark` on none.
    """
    found: list[float] = []
    for score, earlier in zip(scores, depending_on(leans_on, on_doubt=on_doubt), strict=True):
        own = math.inf if score is None or not math.isfinite(score) else score
        found.append(own if earlier is None else max(own, found[earlier]))
    return [score if score < math.inf else None for score in found]


def depending_on(leans_on: Sequence[int | None], *, on_doubt: OnDoubt) -> list[int | None]:
    """The earlier sentence without which each is not delivered."""
    if on_doubt in ("stop", "escalate"):
        return [number - 1 if number else None for number in range(len(leans_on))]
    return list(leans_on) if on_doubt == "drop" else [None] * len(leans_on)
