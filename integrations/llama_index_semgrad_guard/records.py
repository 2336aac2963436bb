"""LlamaIndex's messages, tools and responses as ours, and whether an answer is made of a model's texts.

Code that passes a text on may have cut it, or changed its case and its marks. A class or a method of LlamaIndex's name
proves nothing either: subclasses, parsers, wrappers and validators may have put other words into what it returns. So
words are compared, texts joined and structures read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, cast

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.output_parsers.utils import extract_json_str
from llama_index.core.tools import BaseTool
from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from semgrad_guard import METADATA_KEY, Generation, GenerationOptions, LanguageModel, Message, ToolCall, Verdict
from semgrad_guard.adapters.calls import AnswerForm, new_id, short_id, verdict_of_record
from semgrad_guard.errors import InputError

REASONING = "reasoning_content"
"""Where `raw` holds the reasoning before an answer."""

EXPECTED = "expected a text or a Response (of an LLM's answer, its text: llm.complete(...).text)"

_ROLES: Mapping[MessageRole, str] = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_conversation(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """LlamaIndex's messages as roles, plain text and tool calls, without earlier thoughts.

    Raises:
        InputError: a message that a text model cannot be shown (images, audio), named by number.
    """
    conversation = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    names = {call.id: call.name for message in conversation for call in message.tool_calls}
    return tuple(
        message if message.tool_call_id is None else replace(message, name=names.get(message.tool_call_id))
        for message in conversation
    )


def calls_tools(conversation: Sequence[Message]) -> bool:
    """Whether a conversation holds calls of tools."""
    return any(message.tool_calls for message in conversation)


def without_calls(conversation: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation without calls of tools, and without the messages that hold nothing else."""
    kept = [message for message in conversation if message.content.strip() or not message.tool_calls]
    return tuple(replace(message, tool_calls=()) for message in kept)


def raw_record(generation: Generation, model: str) -> dict[str, Any]:
    """The content of `raw`, whether or not the answer has been scored: plain JSON types."""
    read, produced = len(generation.prompt.ids), generation.completion_tokens
    usage = {"prompt_tokens": read, "completion_tokens": produced, "total_tokens": read + produced}
    return {"model": model, "finish_reason": generation.finish_reason, "usage": usage}


def get_verdict(response: Any) -> Verdict | None:
    """The verdict on a delivered response, None if it carries none; its text is the response's own.

    After an escalation it is the target's own verdict, with the draft's as `escalated_from`. Reads the responses of
    guarded query engines, chat engines and agents, and those of a `SemGradLLM` without a guard. A response that streams
    carries its record once the stream has ended.

    Raises:
        InputError: there is a record, but of another schema, or damaged.
    """
    verdict = decided_of(response)
    return None if verdict is None else verdict.delivered


def decided_of(response: Any) -> Verdict | None:
    """The verdict of the guard that decided about a response, None without one."""
    for name in ("metadata", "raw"):
        place: Any = getattr(response, name, None)
        if isinstance(place, Mapping) and METADATA_KEY in place:
            return verdict_of_record(place[METADATA_KEY], text_of(response))
    return None


class Chunk(NamedTuple):
    """A whole answer, or one so far: its text and its thought, in a stream the newest piece of either, and at the end
    the record and the calls."""

    text: str
    delta: str | None = None
    thought: str = ""
    thought_delta: str | None = None
    record: dict[str, Any] | None = None
    calls: Sequence[ToolCall] = ()


def chat_response(chunk: Chunk) -> ChatResponse:
    """An answer as LlamaIndex's chat methods return it; the record is next to the message, never in it."""
    thought = chunk.thought or (chunk.record or {}).get(REASONING, "")
    calls = [
        ToolCallBlock(tool_call_id=call.id or new_id(), tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in chunk.calls
    ]
    blocks = [*([ThinkingBlock(content=thought)] if thought else []), TextBlock(text=chunk.text), *calls]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
    thinking = chunk.thought_delta
    more = _verdict_record(chunk.record) if thinking is None else {"thinking_delta": thinking}
    return ChatResponse(message=message, raw=chunk.record, delta=chunk.delta, additional_kwargs=more)


def completion(chunk: Chunk) -> CompletionResponse:
    """An answer as LlamaIndex's completion methods return it."""
    more = _verdict_record(chunk.record)
    return CompletionResponse(text=chunk.text, raw=chunk.record, delta=chunk.delta, additional_kwargs=more)


def completed(response: ChatResponse | CompletionResponse) -> str | Verdict:
    """An LLM's answer: with its verdict if it has one."""
    return decided_of(response) or text_of(response)


def text_of(response: Any) -> str:
    """A response's text. An async stream's `str` would start an event loop, and that of a missing text is "None"."""
    if isinstance(response, Response):
        return response.response or ""
    if isinstance(response, AsyncStreamingResponse):
        return response.response_txt or ""
    return (response.message.content or "") if isinstance(response, ChatResponse) else str(response)


def require_text(value: Any) -> str:
    """A text in an engine's response; engines of the user's return any object.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(value, str):
        raise InputError(f"the engine's response holds a {type(value).__name__} in the place of a text; {EXPECTED}")
    return value


def _message(message: ChatMessage, number: int) -> Message:
    role = _ROLES.get(message.role, message.role.value)
    left_out = (CachePoint, ThinkingBlock, ToolCallBlock) if role == "assistant" else (CachePoint, ThinkingBlock)
    texts: list[str] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif not isinstance(block, left_out):
            raise InputError(f"message {number} holds a {type(block).__name__}; this model reads text only")
    text = "\n".join(texts)
    if role == "assistant":
        return Message(role, text, _calls(message, number))
    return Message(role, text, tool_call_id=short_id(message.additional_kwargs.get("tool_call_id")))


def _calls(message: ChatMessage, number: int) -> tuple[ToolCall, ...]:
    """The calls in a message's blocks; or in its further fields, in OpenAI's form, as older integrations have them."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return tuple(ToolCall(b.tool_name, _arguments(b.tool_kwargs), short_id(b.tool_call_id)) for b in blocks)
    calls: list[ToolCall] = []
    for given in message.additional_kwargs.get("tool_calls") or ():
        fields = fields_of(given)
        function = fields_of(fields.get("function"))
        if not isinstance(function.get("name"), str):
            raise InputError(f"message {number} holds a tool call in an unknown form; use ToolCallBlock")
        calls.append(ToolCall(function["name"], _arguments(function.get("arguments")), short_id(fields.get("id"))))
    return tuple(calls)


def fields_of(given: Any) -> Mapping[str, Any]:
    """The fields of a mapping or an object; those of a pydantic model as plain data."""
    if isinstance(given, BaseModel):
        return given.model_dump()
    return cast("Mapping[str, Any]", given if isinstance(given, Mapping) else getattr(given, "__dict__", {}))


def _arguments(given: Any) -> Mapping[str, Any]:
    """A call's arguments; those that cannot be read stay a text."""
    if isinstance(given, Mapping):
        return cast("Mapping[str, Any]", given)
    try:
        read = json.loads(given or "{}")
    except ValueError:
        read = None
    return cast("Mapping[str, Any]", read) if isinstance(read, dict) else {"input": given}


def _verdict_record(record: dict[str, Any] | None) -> dict[str, Any]:
    """`additional_kwargs` of a response: the verdict's record alone."""
    return {METADATA_KEY: record[METADATA_KEY]} if record and METADATA_KEY in record else {}


FEW = 4
"""Texts of fewer words may be the same by chance."""
EMPTY = "Empty Response"
"""The text of LlamaIndex's synthesizers where no model has answered."""
_BETWEEN = "\n---------------------\n"
_NUMBER = re.compile(r"Response \d+: ")
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """A text's words, for comparing."""
    return _WORD.findall(text.casefold())


def repeats(text: str, written: str, *, words: int = FEW) -> bool:
    """Whether one of two texts is the other, or is a part of it and has so many words; case and marks aside."""
    return shares(words_of(text), words_of(written), words=words)


def shares(ours: Sequence[str], theirs: Sequence[str], *, words: int = FEW) -> bool:
    """As `repeats`, of the words of texts. Of `FEW` words and more, the first and the last may have been cut."""
    few, many = sorted((ours, theirs), key=len)
    short, long = " ".join(few), " ".join(many)
    if len(few) < max(words, 1):
        return bool(few) and short == long
    return short in long if len(few) >= FEW else f" {short} " in f" {long} "


def joined(text: str, parts: Sequence[str]) -> bool:
    """Whether a text puts these parts side by side, as accumulating synthesizers do, in whatever order."""
    joined_parts = text.split(_BETWEEN)
    numbered = all(part.startswith(f"Response {number}: ") for number, part in enumerate(joined_parts, start=1))
    unnumbered = [_NUMBER.sub("", part, count=1) for part in joined_parts]
    return numbered and sorted(unnumbered) == sorted(part or EMPTY for part in parts)


def filtered(text: str, written: str) -> bool:
    """Whether a text is the answer within a model's JSON for a `Refine` with answer filtering."""
    data = _data(written)
    return isinstance(data, Mapping) and cast("Mapping[str, Any]", data).get("answer") == text


def structured(structure: BaseModel, text: str, written: Sequence[str | Mapping[str, Any]]) -> bool:
    """Whether a model wrote every value of a structure, and of the text that the structure is shown as.

    `written` are a text and the arguments of calls; one of them holds all of the structure.
    """
    read = any(_is_read_from(structure, _data(one) if isinstance(one, str) else one) for one in written)
    return read and _data(text) == to_jsonable_python(_plain(structure), fallback=str)


def _data(written: str) -> Any:
    """The JSON in a text, None where there is none."""
    try:
        return json.loads(extract_json_str(written))
    except ValueError:
        return None


def _is_read_from(value: Any, data: Any) -> bool:
    """Whether a value is read from this JSON."""
    if isinstance(value, RootModel):
        return _is_read_from(cast("Any", value).root, data)
    if isinstance(value, BaseModel):
        return isinstance(data, Mapping) and _fields_are_read_from(value, cast("Mapping[str, Any]", data))
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        if not isinstance(data, Mapping) or len(held) != len(cast("Mapping[str, Any]", data)):
            return False
        return all(str(key) in data and _is_read_from(inner, data[str(key)]) for key, inner in held.items())
    if isinstance(value, (list, tuple)):
        ours, theirs = cast("Sequence[Any]", value), cast("Sequence[Any]", data)
        same = isinstance(data, list) and len(ours) == len(theirs)
        return same and all(_is_read_from(one, other) for one, other in zip(ours, theirs, strict=True))
    if isinstance(value, Enum):
        return value.value == data
    if value is None or isinstance(value, str):
        return value == data
    try:  # a number, a date or the like, as pydantic reads it
        return bool(TypeAdapter[Any](cast("type[Any]", type(value))).validate_python(data) == value)
    except (ValidationError, PydanticUserError):
        return False


def _fields_are_read_from(structure: BaseModel, data: Mapping[str, Any]) -> bool:
    fields = type(structure).model_fields
    seen = False
    for name, value in structure:
        field = fields.get(name)
        names = (name,) if field is None else (name, field.alias, field.validation_alias)
        key = next((key for key in names if isinstance(key, str) and key in data), None)
        if key is None and field is not None and field.default == value:
            continue  # the class's own, for every answer
        if key is None or not _is_read_from(value, data[key]):
            return False
        seen = True
    return seen or not fields


def _plain(value: Any) -> Any:
    """A structure as the values in it; serializers and computed fields add nothing."""
    if isinstance(value, RootModel):
        return _plain(cast("Any", value).root)
    if isinstance(value, BaseModel):
        return {name: _plain(inner) for name, inner in value}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    return value


# Tools: shown to a model, and its calls of them in the messages of responses.


@dataclass(frozen=True)
class CallOptions:
    """How one answer is written, and its form."""

    writing: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)

    def writing_by(self, model: LanguageModel) -> GenerationOptions:
        """The options of writing, for this model's form of calls.

        Raises:
            UnsupportedToolsError: there are tools, and the model's chat template has none.
        """
        return replace(self.writing, grammar=self.form.grammar(model))

    def calls(self, model: LanguageModel, generation: Generation) -> tuple[ToolCall, ...]:
        """The calls in an answer."""
        return self.form.taken_apart(model, generation).calls

    def readable(self, model: LanguageModel, generation: Generation) -> Generation:
        """The answer without the calls in it as its text; a call that cannot be read stays as the model wrote it."""
        found = self.form.taken_apart(model, generation)
        if not found.calls and not found.broken:
            return generation
        return replace(generation, text="\n".join(filter(None, (found.text, *found.broken))))


class ToolCallingLLM(FunctionCallingLLM):
    """An LLM whose `chat` methods take tools as OpenAI describes them, and return calls as blocks of the message."""

    def _prepare_chat_with_tools(  # noqa: PLR0917 - LlamaIndex's signature
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto")
        question = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([] if question is None else [question])]
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, **({"tools": described, "tool_choice": choice} if tools else {}), **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """The response, with its first call alone where no other was to be made."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if len(calls) > 1 and not allow_parallel_tool_calls:
            others = calls[1:]
            response.message.blocks = [block for block in response.message.blocks if block not in others]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response.

        Raises:
            InputError: there are none, and one is due.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise InputError("the model's answer calls no tool; use tool_required=True, or error_on_no_tool_call=False")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, Mapping) else {},
            )
            for call in calls
        ]
