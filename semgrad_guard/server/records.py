"""Verdicts as they leave the server: plain data, and nothing of an answer that was withheld."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semgrad_guard.records import METADATA_KEY, Verdict

ACTION_HEADER = "x-semgrad-guard-action"
ENFORCED_HEADER = "x-semgrad-guard-enforced"
"""There where the action is advice, and the answer was delivered whatever it is."""
ID_HEADER = "x-semgrad-guard-decision-id"
KEY = METADATA_KEY

WITHHELD = "the answer is not let through"
"""All that a client is told of why."""
_OF_ANY_DRAFT = frozenset(
    (
        *("schema", "digest", "action", "enforced", "promised", "decision_id", "escalated"),
        *("estimator", "settings", "threshold", "calibration_id", "upstream"),
        *("model", "revision", "fingerprint", "prompt_template"),
    )
)
"""What a verdict says of the model, the policy and the delivered text. It is the same whatever the draft was."""
_UNTOLD: Mapping[str, Any] = {"status": "unscored", "unfamiliar": [], "scored_tokens": 0, "reason": WITHHELD}
"""What stands in the other fields, where it is not None."""


_SCORES = frozenset(
    (
        *("uncertainty", "confidence", "semgrad", "paragrad", "paragrad_error"),
        *("mean_entropy", "gnll", "max_probability"),
    )
)
"""What compares one text with another."""


def public_record(verdict: Verdict, *, scores: bool = True) -> dict[str, Any]:
    """A verdict as clients get it.

    Of a withheld answer it says that it was withheld, by which threshold, and the decision's id; its score and the
    reason are in the decision log. Without `scores` a delivered text's score is not told either.
    """
    record = verdict.metadata()
    if verdict.escalated is not None:
        record["escalated"] = public_record(verdict.escalated)
    if verdict.shows_draft:
        return record if scores else {name: None if name in _SCORES else value for name, value in record.items()}
    return {name: value if name in _OF_ANY_DRAFT else _UNTOLD.get(name) for name, value in record.items()}
