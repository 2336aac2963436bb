"""The form that a call wants its answer in: tools it may or must call, JSON it must be, in OpenAI's words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.grammar import FORM_FIELDS, json_rule, one_of
from semgrad_guard.engine.prompts.tool_format import Tool, ToolAnswer
from semgrad_guard.errors import InputError
from semgrad_guard.records import Message

FORM_OPTIONS = frozenset(FORM_FIELDS)
"""The options of a call for its answer's form."""


@dataclass(frozen=True)
class AnswerForm:
    """The form of one answer. It must call one of the `forced` tools, and its JSON must follow `schema`.

    With tools and a schema, an answer is either a call or JSON. `switches` are the chat template's options about the
    reasoning before it.
    """

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    schema: Mapping[str, Any] | None = None
    instruction: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AnswerForm:
        """The form in a call's options.

        Raises:
            InputError: a `tool_choice` that names no tool at hand, or a `response_format` of an unknown type.
        """
        tools = tuple(cast("Sequence[Tool]", options.get("tools") or ()))
        choice = options.get("tool_choice")
        if choice in ("none", False):
            tools = ()
        schema, instruction = _response_schema(options.get("response_format"))
        return cls(tools, _forced(choice, tools), schema, instruction)

    @property
    def template_options(self) -> dict[str, Any]:
        """The options for the chat template."""
        return {**({"tools": list(self.tools)} if self.tools else {}), **self.switches}

    def taken_apart(self, model: LanguageModel, generation: Generation) -> ToolAnswer:
        """An answer in this form: its text, its calls, and calls that cannot be read."""
        return model.tool_answer(generation) if self.tools else ToolAnswer(generation.text)

    def instructed(self, conversation: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation with the schema after the user's last message (not every template has a system message)."""
        if not self.instruction or not conversation:
            return conversation
        users = [i for i, message in enumerate(conversation) if message.role == "user"]
        target = users[-1] if users else len(conversation) - 1
        message = replace(conversation[target], content=f"{conversation[target].content}\n\n{self.instruction}")
        return (*conversation[:target], message, *conversation[target + 1 :])

    def grammar(self, model: LanguageModel) -> str | None:
        """The grammar of the answer; None where it is free, free to call a tool included.

        Raises:
            UnsupportedToolsError: the model's chat template has no tools.
        """
        if self.tools:
            _ = model.tool_format
        if not self.forced and self.schema is None:
            return None
        calls = self.forced or self.tools
        rules = [model.tool_format.rule(calls, model.special_tokens)] if calls else []
        if self.schema is not None and not self.forced:
            rules.append(json_rule(self.schema))
        return one_of(rules)


def _forced(choice: Any, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if choice in (None, "auto", "none", False):
        return ()
    if isinstance(choice, Mapping):
        choice = cast("Mapping[str, Any]", choice).get("function", {}).get("name")
    chosen = (
        tools if choice in ("any", "required", True) else tuple(t for t in tools if t["function"]["name"] == choice)
    )
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "there are no tools"
        raise InputError(
            f"tool_choice={choice!r} is neither 'auto', 'required' ('any') or 'none' nor the name of a tool ({names})"
        ).about("tool_choice")
    return chosen


def _response_schema(response_format: Any) -> tuple[Mapping[str, Any] | None, str]:
    """The schema an answer must follow, and the instruction to the model."""
    if response_format is None:
        return None, ""
    given = cast("Mapping[str, Any]", response_format if isinstance(response_format, Mapping) else {})
    if given.get("type") == "text":
        return None, ""
    if given.get("type") == "json_object":
        return {"type": "object"}, ""
    described = cast("Mapping[str, Any]", given.get("json_schema") or {})
    schema: Any = described.get("schema")
    if given.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise InputError(
            f"response_format={str(cast('object', response_format))[:200]} is not known; use "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}, {"type": "json_object"} or '
            '{"type": "text"}'
        ).about("response_format")
    found = cast("Mapping[str, Any]", schema)
    return found, f"Answer with JSON that follows this schema, and with nothing else:\n{json.dumps(found)}"
