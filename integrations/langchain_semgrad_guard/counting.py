"""How many tokens messages take, as the model itself reads them: for `trim_messages` and whoever else packs prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from semgrad_guard import LanguageModel, Message
from semgrad_guard.errors import InputError


def count_tokens(model: LanguageModel, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompt for a conversation, the words of the chat template and the tools' descriptions included.

    LangChain trims a chat by counting parts of it, the last message first, which many chat templates refuse (two turns
    of one role, an answer before any question). Then each message is counted by itself, with a template's words around
    each: never too few.
    """
    options = {"tools": list(tools)} if tools else {}
    try:
        return model.count_tokens(conversation, **options)
    except InputError:
        described = model.count_tokens([Message("user", json.dumps(list(tools)))]) if tools else 0
        return described + sum(_alone(model, message) for message in conversation)


def _alone(model: LanguageModel, message: Message) -> int:
    """One message by itself; as a user's where the template refuses its role at the start of a conversation."""
    try:
        return model.count_tokens([message])
    except InputError:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        said = "\n".join([message.content, *map(json.dumps, calls)])
        return model.count_tokens([Message("user", said)])
