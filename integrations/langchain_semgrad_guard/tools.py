"""Tools in whatever form LangChain knows, as OpenAI describes them; and their calls, between its messages and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs

from semgrad_guard import ToolCall
from semgrad_guard.adapters.call_ids import new_id, short_id

AnyTool = dict[str, Any] | type | Callable[..., Any] | BaseTool

CALL_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"})
"""Content blocks in which providers say again what stands in a message's `tool_calls`."""


def openai_tools(tools: Sequence[AnyTool], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """The tools' descriptions, their schemas without references."""
    converted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    return [{**tool, "function": _self_contained(tool["function"])} for tool in converted]


def call_fields(calls: Sequence[ToolCall], broken: Sequence[str]) -> dict[str, Any]:
    """The calls of an answer, and those that cannot be read, as fields of a message; none where there are none."""
    fields = {
        "tool_calls": [tool_call(name=c.name, args=dict(c.arguments), id=c.id or new_id()) for c in calls],
        "invalid_tool_calls": [
            invalid_tool_call(name=None, args=text, id=new_id(), error="this tool call cannot be read")
            for text in broken
        ],
    }
    return {key: value for key, value in fields.items() if value}


def calls_of(message: AIMessage) -> tuple[ToolCall, ...]:
    """A message's calls, for the chat template."""
    return tuple(ToolCall(call["name"], call["args"], short_id(call["id"])) for call in message.tool_calls)


def unreadable_of(message: AIMessage) -> str:
    """What the model wrote where a call could not be read: it should see that in the history."""
    return "\n".join(call["args"] or "" for call in message.invalid_tool_calls)


def _self_contained(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose parameters refer to nothing outside themselves: they become a part of a larger schema."""
    if "$defs" not in (function.get("parameters") or {}):
        return dict(function)
    parameters = {key: value for key, value in dereference_refs(function["parameters"]).items() if key != "$defs"}
    return {**function, "parameters": parameters}
