"""The score that a policy compares with its threshold, for each sentence of an answer.

A sentence is delivered only with those that it depends on, so it counts with the greatest of their scores. It then
depends on nothing but its own number whether it is delivered, at any threshold: a promise about sentences is about
these numbers, and every front decides by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

OnDoubt = Literal["stop", "drop", "mark", "escalate"]
"""The answer ends before a doubtful sentence; or goes on without it and those that lean on it; or holds it, marked; or
another model finishes it. Under `mark` and `escalate` the promise is about the sentences before, and without, marks."""


def compared_scores(scores: Sequence[float | None], leans: Sequence[bool], *, on_doubt: OnDoubt) -> list[float | None]:
    """The scores that are compared, in the order of the text; None where a sentence can never be delivered.

    `scores` are the sentences' own, None (or not finite) where there is none; `leans` tells which of them lean on the
    one before ("It is ..."). Under `stop` and `escalate` a sentence depends on all before it, under `drop` on those
    that it leans on, and under `mark` on none.
    """
    found: list[float | None] = []
    reached = -math.inf
    for score, leaning in zip(scores, leans, strict=True):
        own = math.inf if score is None or not math.isfinite(score) else score
        depends = on_doubt in ("stop", "escalate") or (on_doubt == "drop" and leaning)
        reached = max(reached, own) if depends else own
        found.append(reached if reached < math.inf else None)
    return found
