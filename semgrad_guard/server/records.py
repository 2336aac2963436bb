"""Verdicts as they leave the server: plain data, and nothing of an answer that was withheld."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.guard import is_withheld
from semgrad_guard.records import METADATA_KEY, Verdict

ACTION_HEADER = "x-semgrad-guard-action"
ENFORCED_HEADER = "x-semgrad-guard-enforced"
"""There where the action is advice, and the answer was delivered whatever it is."""
ID_HEADER = "x-semgrad-guard-decision-id"
KEY = METADATA_KEY

_OF_THE_DRAFT: Mapping[str, Any] = {
    "scored_tokens": 0,
    "gnll": None,
    "mean_entropy": None,
    "max_probability": None,
    "cut": None,
    "draft": None,
    "semgrad": None,
    "paragrad": None,
    "scoring_ms": None,
}
"""What tells how long a draft was, how likely its tokens, or lets a guess at it be confirmed more surely than by its
score alone."""
_CUT = "the answer was cut off"


def public_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as clients get it.

    The score and the reason of a withheld answer stay; its likelihoods, its length and its text do not.
    """
    record = verdict.metadata()
    if verdict.escalated is not None:
        record["escalated"] = public_record(verdict.escalated)
    if verdict.escalated is None and not is_withheld(verdict) and verdict.draft is None:
        return record
    unfamiliar = [_CUT + " elsewhere" if each.startswith(_CUT) else each for each in record["unfamiliar"]]
    return {**record, **_OF_THE_DRAFT, "unfamiliar": unfamiliar}
