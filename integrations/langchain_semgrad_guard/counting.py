"""How many tokens messages take, as the model itself reads them: for `trim_messages` and whoever else packs prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from semgrad_guard import LanguageModel, Message
from semgrad_guard.errors import InputError


def count_tokens(model: LanguageModel, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompt for a conversation, the words of the chat template and the tools' descriptions included.

    LangChain trims a chat by counting parts of it, the last message first. Many chat templates refuse such parts (two
    turns of one role, an answer before any question) or leave their text out (a system prompt without a question).
    Then each message is counted by itself, with a template's words around each: never too few.
    """
    options = {"tools": list(tools)} if tools else {}
    whole = _rendered(model, conversation, options)
    if whole is not None:
        return whole
    described = model.count_tokens([Message("user", json.dumps(list(tools)))]) if tools else 0
    return described + sum(_alone(model, message) for message in conversation)


def _alone(model: LanguageModel, message: Message) -> int:
    """One message by itself; as a user's where the template does not show its role at the start of a conversation."""
    found = _rendered(model, [message], {})
    if found is not None:
        return found
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    said = "\n".join([message.content, *map(json.dumps, calls)])
    return model.count_tokens([Message("user", said)])


def _rendered(model: LanguageModel, conversation: Sequence[Message], options: dict[str, Any]) -> int | None:
    """Tokens of the prompt; None where the template refuses the conversation or leaves a message out."""
    try:
        found = model.count_tokens(conversation, **options)
    except InputError:
        return None
    texts: Any = [model.tokenizer(message.content, add_special_tokens=False) for message in conversation]
    return found if found >= sum(len(text["input_ids"]) for text in texts) else None
