"""Answers and verdicts as they leave the server: plain data, and nothing of an answer that was withheld."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semgrad_guard.records import METADATA_KEY, ToolCall, Verdict

ACTION_HEADER = "x-semgrad-guard-action"
ENFORCED_HEADER = "x-semgrad-guard-enforced"
"""Present where the action is advice, and the answer was delivered in any case."""
ID_HEADER = "x-semgrad-guard-decision-id"
KEY = METADATA_KEY

WITHHELD = "the answer is not let through"
"""The only reason that a client gets."""
_OF_ANY_DRAFT = frozenset(
    (
        *("schema", "digest", "action", "enforced", "promised", "decision_id", "escalated"),
        *("estimator", "settings", "threshold", "calibration_id", "upstream"),
        *("model", "revision", "fingerprint", "prompt_template"),
    )
)
"""The fields about the model, the policy and the delivered text: they are the same whatever the draft was."""
_WITHHELD_FIELDS: Mapping[str, Any] = {
    "status": "unscored",
    "unfamiliar": [],
    "scored_tokens": 0,
    "reason": WITHHELD,
}
"""The other fields of a withheld answer, where they are not None."""
_SCORES = frozenset(
    (
        *("uncertainty", "confidence", "semgrad", "paragrad", "paragrad_error"),
        *("mean_entropy", "gnll", "max_probability"),
    )
)
"""The fields that compare one text with another."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer in plain data, written by the engine, an upstream or a target.

    `logprobs` are entries in OpenAI's form, None where the request wants none. `completion_tokens` is None where the
    other server does not count them; `together` counts those of all answers to the request, where it counts no single
    answer. `pieces` are the text that each token adds, where a client's cuts are still to be made. `extra` are another
    server's fields, passed on unchanged. `reasoning` is the text that another server wrote before the
    answer: None for no reasoning, "" where its text is not known.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    logprobs: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    together: int | None = None
    pieces: tuple[str, ...] | None = None
    extra: Mapping[str, Any] | None = None
    reasoning: str | None = None


def tool_call_fields(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id or "", "type": "function", "function": {"name": call.name, "arguments": arguments}}


def public_record(verdict: Verdict, *, scores: bool = True) -> dict[str, Any]:
    """A verdict as clients get it.

    The record of a withheld answer holds the action, the threshold, and the decision's id; its score and the reason are
    in the decision log. Without `scores`, a delivered text's score is left out too.
    """
    record = verdict.metadata()
    if verdict.escalated is not None:
        record["escalated"] = public_record(verdict.escalated)
    if verdict.shows_draft:
        return record if scores else {name: None if name in _SCORES else value for name, value in record.items()}
    return {name: value if name in _OF_ANY_DRAFT else _WITHHELD_FIELDS.get(name) for name, value in record.items()}
