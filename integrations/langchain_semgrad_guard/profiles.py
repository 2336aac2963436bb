"""A model's profile, which LangChain and its agents read before they use it; and how many tokens messages take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.language_models import ModelProfile

from semgrad_guard import LanguageModel, Message
from semgrad_guard.adapters.settings import read_json, template_calls_tools
from semgrad_guard.errors import InputError

_TEXT = dict.fromkeys(["text_inputs", "text_outputs", "structured_output", "temperature", "open_weights"], True)


def profile_of(model: LanguageModel) -> ModelProfile:
    """The profile of a loaded model."""
    return _profile(model.context_window, calls_tools=model.knows_tools)


def profile_on_disk(name_or_path: str, revision: str | None, options: Mapping[str, Any] | None) -> ModelProfile | None:
    """The profile of a model that is not loaded; None where its files are not on this disk yet. Loads no weights."""
    config = read_json(name_or_path, "config.json", revision)
    if config is None:
        return None
    window = (config.get("text_config") or config).get("max_position_embeddings")
    return _profile(window, calls_tools=bool(template_calls_tools(name_or_path, revision, options)))


def _profile(window: int | None, *, calls_tools: bool) -> ModelProfile:
    found = {**_TEXT, "tool_calling": calls_tools, "tool_choice": calls_tools}
    return cast("ModelProfile", found if window is None else {**found, "max_input_tokens": window})


def count_tokens(model: LanguageModel, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompt for a conversation, the words of the chat template and the tools' descriptions included.

    LangChain trims a chat by counting parts of it, the last message first. Many chat templates refuse such parts (two
    turns of one role, an answer before any question) or leave their text out (a system prompt without a question).
    Then each message is counted as a user's turn of its own: never too few.
    """
    options = {"tools": list(tools)} if tools else {}
    try:
        whole = model.count_tokens(conversation, **options)
    except InputError:
        whole = -1
    contents: Any = [model.tokenizer(message.content, add_special_tokens=False) for message in conversation]
    if whole >= sum(len(content["input_ids"]) for content in contents):
        return whole
    texts = [*map(_spelled, conversation), *map(json.dumps, tools)]
    return sum(model.count_tokens([Message("user", text)]) for text in texts)


def _spelled(message: Message) -> str:
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    return "\n".join([message.content, *calls])
