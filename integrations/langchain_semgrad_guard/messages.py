"""Between LangChain's messages and ours: conversations in, scored answers out, verdicts back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import UsageMetadata
from pydantic import ValidationError

from langchain_semgrad_guard.tool_calls import CALL_BLOCKS, calls_of, short_id, unreadable_of
from semgrad_guard import METADATA_KEY, Generation, Message, Verdict
from semgrad_guard.errors import InputError

M = TypeVar("M", bound=AIMessage)

PROVIDER = "semgrad_guard"
"""`model_provider` in response metadata and in traces."""

_ROLES: Mapping[str, str] = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool"}
_LEFT_OUT = CALL_BLOCKS | {"thinking", "redacted_thinking", "reasoning", "reasoning_content", "non_standard"}
"""Blocks of an assistant's earlier turn that are no part of the next prompt: calls stand in `tool_calls` too, and chat
templates leave earlier reasoning out."""
_SAFE_METADATA = ("model_name", "model_provider")


def to_conversation(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """LangChain's messages as roles, plain text and tool calls.

    Raises:
        InputError: a message that a text model cannot be shown (images, audio, files), named by number.
    """
    return tuple(_turn(message, number) for number, message in enumerate(messages, start=1))


def usage(generation: Generation) -> UsageMetadata:
    """Tokens read, how many of them an earlier prompt had in common, and tokens produced (the end token counts)."""
    read, produced = len(generation.prompt.ids), generation.completion_tokens
    found = UsageMetadata(input_tokens=read, output_tokens=produced, total_tokens=read + produced)
    if generation.reused_tokens:
        found["input_token_details"] = {"cache_read": generation.reused_tokens}
    return found


def response_metadata(finish_reason: str, verdict: Verdict) -> dict[str, Any]:
    """What stands beside an answer: plain JSON types only, for caches, checkpointers and traces."""
    return {
        "model_name": verdict.model,
        "model_provider": PROVIDER,
        "finish_reason": finish_reason,
        METADATA_KEY: verdict.metadata(),
    }


def get_verdict(message: BaseMessage) -> Verdict | None:
    """The verdict that a message carries, None if it carries none.

    The record in the metadata holds no text: `verdict.text` is the message's own.

    Raises:
        InputError: there is a record, but of another schema, or damaged.
    """
    record: Any = message.response_metadata.get(METADATA_KEY)
    if record is None:
        return None
    try:
        return Verdict.model_validate(_with_text(record, message_text(message)))
    except (ValidationError, TypeError, ValueError) as error:
        raise InputError(
            f"the message's {METADATA_KEY!r} metadata cannot be read ({error}); was it written by another version?"
        ) from error


def decided(message: M, verdict: Verdict) -> M:
    """The same answer with the decision about it; the original, which may sit in a cache, stays as it is."""
    metadata = {**message.response_metadata, METADATA_KEY: verdict.metadata()}
    return message.model_copy(update={"response_metadata": metadata})


def abstention(draft: AIMessage, verdict: Verdict, *, keep_draft: bool) -> AIMessage:
    """The message that stands in for a withheld answer: its score stays, its text, tool calls and tokens do not."""
    kept = {key: value for key, value in draft.response_metadata.items() if key in _SAFE_METADATA}
    record = verdict.metadata(keep_draft=keep_draft)
    message = AIMessage(
        content=verdict.text, id=draft.id, response_metadata={**kept, "finish_reason": "stop", METADATA_KEY: record}
    )
    return _with_usage(message, draft)


def escalation(answer: AIMessage, verdict: Verdict, *, keep_draft: bool) -> AIMessage:
    """The target's answer with the verdict on both; usage and model name are the target's."""
    record = verdict.metadata(keep_draft=keep_draft)
    return answer.model_copy(update={"response_metadata": {**answer.response_metadata, METADATA_KEY: record}})


def as_message(answer: Any) -> AIMessage:
    """What an escalation target returned, as a message.

    Raises:
        InputError: it returned neither a message nor a string.
    """
    if isinstance(answer, str):
        return AIMessage(content=answer)
    if isinstance(answer, AIMessageChunk):
        answer = message_chunk_to_message(answer)
    if isinstance(answer, AIMessage):
        return answer
    raise InputError(
        f"the escalation target returned a {type(answer).__name__}; it must return a message or a string "
        "(end a chain with its chat model, which keeps the score, or with StrOutputParser())"
    )


def as_chunk(message: AIMessage) -> AIMessageChunk:
    """A whole message as the only chunk of a stream."""
    fields = message.model_dump(exclude={"type", "usage_metadata"})
    return _with_usage(AIMessageChunk(**fields, chunk_position="last"), message)


def in_form_of(message: M, draft: BaseMessage) -> M:
    """The message with content blocks where the draft in whose place it stands has them (`output_version="v1"`)."""
    version = draft.response_metadata.get("output_version")
    if version is None or message.response_metadata.get("output_version") == version:
        return message
    metadata = {**message.response_metadata, "output_version": version}
    return message.model_copy(update={"content": message.content_blocks, "response_metadata": metadata})


def message_text(message: BaseMessage) -> str:
    """The text of a message, its blocks joined."""
    return str(message.text)


def _with_usage(message: M, source: AIMessage) -> M:
    """The message with another's usage, unchecked: LangChain's cache puts incomplete ones into messages without any."""
    return message.model_copy(update={"usage_metadata": source.usage_metadata})


def _turn(message: BaseMessage, number: int) -> Message:
    kind = message.type.removesuffix("MessageChunk").lower()
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(kind)
    if role is None:
        raise InputError(f"message {number} is a {message.type!r} message, which has no place in a chat template")
    if isinstance(message, AIMessage):
        said = (_text(_said(message), number), unreadable_of(message))
        return Message(role, "\n".join(filter(None, said)), calls_of(message))
    text = _text(message.content, number)
    if isinstance(message, ToolMessage):
        return Message(role, text, tool_call_id=short_id(message.tool_call_id), name=message.name)
    return Message(role, text)


def _said(message: AIMessage) -> str | list[str | dict[str, Any]]:
    """The content without the blocks that are not shown to the model again."""
    if isinstance(message.content, str):
        return message.content
    return [block for block in message.content if isinstance(block, str) or block.get("type") not in _LEFT_OUT]


def _text(content: str | list[str | dict[str, Any]], number: int) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, number) for block in content)


def _block_text(block: str | dict[str, Any], number: int) -> str:
    if isinstance(block, str):
        return block
    text = block.get("text")
    if block.get("type", "text") != "text" or not isinstance(text, str):
        raise InputError(f"message {number} holds a {block.get('type')!r} block; this model reads text only")
    return text


def _with_text(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A metadata record with what `Verdict.metadata()` left out."""
    fields = dict(record)
    fields["schema_version"] = fields.pop("schema", None)
    if fields.get("escalated") is not None:
        fields["escalated"] = _with_text(fields["escalated"], text)
    return {**fields, "text": text}
