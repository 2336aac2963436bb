"""Tools in whatever form LangChain knows, as OpenAI describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs

AnyTool = dict[str, Any] | type | Callable[..., Any] | BaseTool


def openai_tools(tools: Sequence[AnyTool], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """The tools' descriptions, their schemas without references."""
    converted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    return [{**tool, "function": _self_contained(tool["function"])} for tool in converted]


def _self_contained(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose parameters refer to nothing outside themselves: they become a part of a larger schema."""
    if "$defs" not in (function.get("parameters") or {}):
        return dict(function)
    parameters = {key: value for key, value in dereference_refs(function["parameters"]).items() if key != "$defs"}
    return {**function, "parameters": parameters}
