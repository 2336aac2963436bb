"""Between LlamaIndex's messages and ours: conversations in, records out, verdicts back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response

from semgrad_guard import METADATA_KEY, Generation, Message, Verdict
from semgrad_guard.adapters.records import verdict_of_record
from semgrad_guard.errors import InputError

REASONING = "reasoning_content"
"""Where `raw` holds the reasoning before an answer."""

_ROLES: Mapping[MessageRole, str] = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_conversation(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """LlamaIndex's messages as roles and plain text.

    Raises:
        InputError: a message that a text model cannot be shown (images, audio, tool calls), named by number.
    """
    return tuple(_turn(message, number) for number, message in enumerate(messages, start=1))


def raw_record(generation: Generation, model: str) -> dict[str, Any]:
    """What stands in `raw`, whether or not the answer has been scored: plain JSON types."""
    read, produced = len(generation.prompt.ids), generation.completion_tokens
    usage = {"prompt_tokens": read, "completion_tokens": produced, "total_tokens": read + produced}
    return {"model": model, "finish_reason": generation.finish_reason, "usage": usage}


def get_verdict(response: Any) -> Verdict | None:
    """The verdict on what a response delivers, None if it carries none; its text is the response's own.

    After an escalation it is the target's own verdict, with the draft's as `escalated_from`. Reads what guarded query
    engines, chat engines and agents deliver, and what `SemGradLLM` answers by itself. A response that streams carries
    its record once the stream has ended.

    Raises:
        InputError: there is a record, but of another schema, or damaged.
    """
    verdict = decided_of(response)
    return None if verdict is None else verdict.delivered


def decided_of(response: Any) -> Verdict | None:
    """The verdict of whoever decided about a response, None if nobody did."""
    for name in ("metadata", "raw"):
        place: Any = getattr(response, name, None)
        if isinstance(place, Mapping) and METADATA_KEY in place:
            return verdict_of_record(place[METADATA_KEY], text_of(response))
    return None


def chat_response(text: str, record: dict[str, Any] | None, *, delta: str | None = None) -> ChatResponse:
    """An answer as LlamaIndex's chat methods return it; the record stands beside the message, never in it."""
    thought = None if record is None else record.get(REASONING)
    blocks = [*([ThinkingBlock(content=thought)] if thought else []), TextBlock(text=text)]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
    return ChatResponse(message=message, raw=record, delta=delta, additional_kwargs=_beside(record))


def completion(text: str, record: dict[str, Any] | None, *, delta: str | None = None) -> CompletionResponse:
    """An answer as LlamaIndex's completion methods return it."""
    return CompletionResponse(text=text, raw=record, delta=delta, additional_kwargs=_beside(record))


def completed(response: ChatResponse | CompletionResponse) -> str | Verdict:
    """An LLM's answer: with its verdict if it has one."""
    return decided_of(response) or text_of(response)


def text_of(response: Any) -> str:
    """What a response delivers. An async stream's `str` would start an event loop, and that of no text says "None"."""
    if isinstance(response, Response):
        return response.response or ""
    if isinstance(response, AsyncStreamingResponse):
        return response.response_txt or ""
    return (response.message.content or "") if isinstance(response, ChatResponse) else str(response)


def _turn(message: ChatMessage, number: int) -> Message:
    texts: list[str] = []
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):  # chat templates leave earlier reasoning out
            continue
        if not isinstance(block, TextBlock):
            raise InputError(f"message {number} holds a {type(block).__name__}; this model reads text only")
        texts.append(block.text)
    if message.additional_kwargs.get("tool_calls"):
        raise InputError(f"message {number} holds tool calls, which SemGradLLM cannot show its model")
    return Message(_ROLES.get(message.role, message.role.value), "\n".join(texts))


def _beside(record: dict[str, Any] | None) -> dict[str, Any]:
    """`additional_kwargs` of a response: the verdict's record alone."""
    return {METADATA_KEY: record[METADATA_KEY]} if record and METADATA_KEY in record else {}
