"""Whether an answer's fields hold reasoning before it, by the names that servers and frameworks use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from semgrad_guard.engine.prompts.reasoning import HeldText

__all__ = ["BLOCKS", "HeldText", "tells_reasoning"]

BLOCKS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
"""Types of content blocks that hold reasoning."""

_NAMES = (
    *("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details", "thinking_content"),
    *("thought", "thoughts", "thought_summary", "reasoning_text", "reasoning_summary", "reasoning_blocks"),
)
_COUNTS = (
    *("reasoning_tokens", "reasoning", "thoughts_token_count", "thinking_tokens", "thought_tokens", "thoughts_tokens"),
    *("reasoning_token_count", "reasoningTokens"),
)
_USAGE = (
    "usage",
    "token_usage",
    "usage_metadata",
    "completion_tokens_details",
    "output_token_details",
    "output_tokens_details",
    "completionTokensDetails",
    "details",
    "provider_specific_fields",
    "additional_kwargs",
)


def tells_reasoning(*records: object) -> bool:
    """Whether one of the records (a message's further fields, its metadata, its usage) holds reasoning."""
    for record in (cast("Mapping[str, Any]", given) for given in records if isinstance(given, Mapping)):
        counts = (record.get(name) for name in _COUNTS)
        if (
            any(_holds(record.get(name)) for name in _NAMES)
            or any(isinstance(count, int | float) and count > 0 for count in counts)
            or tells_reasoning(*(record.get(name) for name in _USAGE))
        ):
            return True
    return False


def _holds(value: object) -> bool:
    """Whether a field holds reasoning: text, parts, or an item of OpenAI's; settings of reasoning are not."""
    if isinstance(value, Mapping):
        item = cast("Mapping[str, Any]", value)
        return item.get("type") == "reasoning" or any(item.get(name) for name in ("content", "text"))
    return isinstance(value, str | list) and value not in ("", [])
