"""`Answer`: what the server delivers beside a verdict, whoever wrote it: the engine, an upstream or a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semgrad_guard.records import ToolCall


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer in plain data.

    `logprobs` are entries in OpenAI's form, None where none were asked for. `completion_tokens` is None where whoever
    wrote it did not say; `together` are those of all answers to the request, where another server counts no other.
    `pieces` are what each token adds to the text, where a client's cuts are still to be made.
    `extra` are fields of another server's message that are passed on as they are.
    `reasoning` is what another server says it wrote before the text: None for nothing, "" where it does not say what.
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
