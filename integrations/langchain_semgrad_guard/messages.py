"""Between LangChain's messages and ours: conversations in, scored answers out, verdicts back again.

And objects instead of messages (`with_structured_output`): a withheld or unfinished answer is an error, no half object.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, TypeVar, cast, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableGenerator,
    RunnableMap,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from semgrad_guard import METADATA_KEY, Generation, Message, ToolCall, Verdict
from semgrad_guard.adapters.calls import BLOCKS, new_id, reasoning_of, short_id
from semgrad_guard.adapters.traces import verdict_of_record
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import is_withheld

M = TypeVar("M", bound=AIMessage)

PROVIDER = "semgrad_guard"
"""`model_provider` in response metadata and in traces."""

REASONING = "reasoning_content"
"""The further field in which LangChain looks for reasoning."""

AnyTool = dict[str, Any] | type | Callable[..., Any] | BaseTool

_CALL_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"})
"""Content blocks in which providers repeat a message's `tool_calls`."""

_ROLES: Mapping[str, str] = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool"}
_LEFT_OUT = _CALL_BLOCKS | BLOCKS | {"non_standard"}
"""Blocks of an assistant's earlier turn that the next prompt leaves out: calls are in `tool_calls` too, and chat
templates leave earlier reasoning out."""
READ_BLOCKS = BLOCKS | {"text"}
"""Blocks of a served model's answer whose text is scored, and those of the reasoning before it."""
_SAFE_METADATA = ("model_name", "model_provider")
_SAFE_COUNTS = frozenset(
    {"input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "total_tokens", "total_cost"}
)


def to_conversation(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """LangChain's messages as roles, plain text and tool calls.

    Raises:
        InputError: a message that a text model cannot be shown (images, audio, files), named by number.
    """
    return tuple(_turn(message, number) for number, message in enumerate(messages, start=1))


def usage(generation: Generation) -> UsageMetadata:
    """Tokens read, and tokens produced (the end token counts)."""
    read, produced = len(generation.prompt.ids), generation.completion_tokens
    found = UsageMetadata(input_tokens=read, output_tokens=produced, total_tokens=read + produced)
    if generation.reasoning is not None:
        found["output_token_details"] = {"reasoning": len(generation.reasoning.ids)}
    return found


def get_verdict(message: BaseMessage) -> Verdict | None:
    """The verdict on the answer that a message delivers, None if it carries none.

    After an escalation its scores, status and model are those of the model that wrote the delivered text;
    `escalated_from` is the stage that handed the question on. The record in the metadata holds no text: `verdict.text`
    is the message's own.

    Raises:
        InputError: it is no message; or there is a record, but of another schema, or damaged.
    """
    verdict = stage_verdict(message)
    return None if verdict is None else verdict.delivered


def stage_verdict(message: BaseMessage) -> Verdict | None:
    """The verdict of the guard that delivered a message, as it was recorded; None if it carries none.

    Raises:
        InputError: there is a record, but of another schema, or damaged.
    """
    if not isinstance(cast("object", message), BaseMessage):
        raise InputError(f"a verdict is on a message (leave StrOutputParser() out), not {message!r:.60}")
    record: Any = message.response_metadata.get(METADATA_KEY)
    if record is None:
        return None
    calls = calls_of(message) if isinstance(message, AIMessage) else ()
    return verdict_of_record(record, message_text(message), calls, whole=not isinstance(message, AIMessageChunk))


def reasoning(message: AIMessage) -> str | None:
    """The reasoning before a message's text, in a block or in a field; "" where only a sign of it is there, as in the
    tokens' count, and None without one."""
    content = message.content if isinstance(message.content, list) else []
    blocks = [block for block in content if isinstance(block, dict) and block.get("type") in BLOCKS]
    texts = [reasoning_of({"reasoning": block.get(str(block["type"]))}) for block in blocks]
    if blocks:
        return "".join(map(str, texts)) if all(texts) else ""
    return reasoning_of(message.additional_kwargs, message.response_metadata, message.usage_metadata)


def with_answer(message: M, verdict: Verdict) -> M:
    """The message with the answer alone as its text, and the reasoning that its text held where LangChain looks for it.

    Log-probabilities, which spell the reasoning as well, are left out.
    """
    if verdict.text == message_text(message):
        return message
    metadata = {key: value for key, value in message.response_metadata.items() if key != "logprobs"}
    kwargs = {**message.additional_kwargs, **reasoning_fields(verdict).get("additional_kwargs", {})}
    changes = {"content": verdict.text, "additional_kwargs": kwargs, "response_metadata": metadata}
    return message.model_copy(update=changes)


def reasoning_fields(verdict: Verdict) -> dict[str, Any]:
    """The field of a message that LangChain reads as a reasoning block."""
    return {"additional_kwargs": {REASONING: verdict.details.reasoning}} if verdict.details.reasoning else {}


def verdict_of(response: LLMResult) -> Verdict | None:
    """The record of a run's answer; None where it carries none."""
    generation = response.generations[0][0] if response.generations and response.generations[0] else None
    return stage_verdict(generation.message) if isinstance(generation, ChatGeneration) else None


def decided(message: M, verdict: Verdict, *, keep_draft: bool = False) -> M:
    """The same answer with the decision about it; the original, which may sit in a cache, stays as it is."""
    metadata = {**message.response_metadata, METADATA_KEY: verdict.metadata(keep_draft=keep_draft)}
    return message.model_copy(update={"response_metadata": metadata})


def abstention(draft: AIMessage, verdict: Verdict, *, keep_draft: bool) -> AIMessage:
    """The message in place of a withheld answer: its score stays, and the calls in the verdict, which may go out; its
    text and tokens do not."""
    bare = textless(draft)
    is_end = bool(verdict.sentences) and verdict.sentences[-1].action == "deliver"  # of a part: the draft's own end
    ended = draft.response_metadata.get("finish_reason", "stop") if is_end else "stop"
    record = {**bare.response_metadata, "finish_reason": ended, METADATA_KEY: verdict.metadata(keep_draft=keep_draft)}
    shown: dict[str, Any] = {"content": verdict.text, "response_metadata": record}
    if verdict.tool_calls:  # those of trusted tools, or some values of one
        pairs = zip(draft.tool_calls, verdict.tool_calls, strict=True)
        calls = [tool_call(name=own.name, args=dict(own.arguments), id=call["id"]) for call, own in pairs]
        shown |= {"tool_calls": calls, "response_metadata": {**record, "finish_reason": "tool_calls"}}
    return bare.model_copy(update=shown)


def textless(message: AIMessage) -> AIMessage:
    """The model's name and the counts of tokens; nothing of the answer.

    This is the one list of fields that may leave with a withheld answer: any other may hold text, in one server's
    answers or another's.
    """
    metadata: Mapping[str, Any] = message.response_metadata
    kept: dict[str, Any] = {name: metadata[name] for name in _SAFE_METADATA if isinstance(metadata.get(name), str)}
    if isinstance(metadata.get("token_usage"), Mapping):
        kept["token_usage"] = _counts(metadata["token_usage"])
    usage = None if message.usage_metadata is None else _counts(message.usage_metadata)
    return AIMessage(content="", response_metadata=kept).model_copy(update={"usage_metadata": usage})


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Counts alone. Details say how the tokens of an answer were made up."""
    return {name: count for name, count in usage.items() if name in _SAFE_COUNTS and isinstance(count, (int, float))}


def escalation(answer: AIMessage, verdict: Verdict, draft: AIMessage, *, keep_draft: bool) -> AIMessage:
    """The target's answer with the verdict on both; the model's name is the target's, the tokens are those of both."""
    record = verdict.metadata(keep_draft=keep_draft)
    usages = [message.usage_metadata for message in (textless(draft), answer)]
    used = [one for one in usages if one is not None and "input_tokens" in one]  # LangChain's cache has incomplete ones
    changes = {
        "response_metadata": {**answer.response_metadata, METADATA_KEY: record},
        "usage_metadata": add_usage(*used) if len(used) == 2 else (used or [None])[0],
    }
    return answer.model_copy(update=changes)


def was_cut(message: AIMessage) -> bool | None:
    """Whether an answer's server reports that a limit ended it, under one of three names.

    None: it is a known provider's, which all give a reason, and has none: it may have been given up.
    """
    metadata = message.response_metadata
    reasons = [metadata.get(name) for name in ("finish_reason", "stop_reason", "done_reason")]
    if not any(reasons) and "model_provider" in metadata:
        return None
    return any(reason in ("length", "max_tokens") for reason in reasons)


def output_of(result: Any) -> Any:
    """The answer in what a chain returns: of a mapping its "answer" or "output", or the last of its "messages"."""
    if isinstance(result, Mapping):
        fields = cast("Mapping[str, Any]", result)
        for name in ("answer", "output"):
            if fields.get(name) is not None:
                return output_of(fields[name])
        if fields.get("messages"):
            return fields["messages"][-1]
    return cast("Any", result)


def as_message(answer: Any) -> AIMessage:
    """An answer as a message.

    Raises:
        InputError: it is neither a message of a model's nor a string.
    """
    if isinstance(answer, AIMessageChunk):
        answer = message_chunk_to_message(answer)
    if isinstance(answer, AIMessage):
        return answer
    if isinstance(answer, str):
        return AIMessage(content=answer)
    raise InputError(
        f"an answer is a message or a string, not a {type(answer).__name__} (end a chain with its chat model, which "
        "keeps the score, or with StrOutputParser())"
    )


def as_chunk(message: AIMessage) -> AIMessageChunk:
    """A whole message as the only chunk of a stream."""
    fields = message.model_dump(exclude={"type", "usage_metadata"})
    unchecked = {"usage_metadata": message.usage_metadata}  # LangChain's cache puts incomplete ones into messages
    return AIMessageChunk(**fields, chunk_position="last").model_copy(update=unchecked)


def logprobs_of(message: BaseMessage) -> Any:
    """The log-probabilities that a message's server reports: OpenAI's object, or the list in it, as Ollama has it.

    Ollama's package makes objects of the entries.
    """
    found: Any = message.response_metadata.get("logprobs")
    entries: Any = cast("Mapping[str, Any]", found).get("content") if isinstance(found, Mapping) else found
    if not isinstance(entries, Sequence):
        return entries
    return [entry.model_dump() if isinstance(entry, BaseModel) else entry for entry in cast("Sequence[Any]", entries)]


def message_text(message: BaseMessage) -> str:
    """The text of a message, its blocks joined."""
    return str(message.text)


def _turn(message: BaseMessage, number: int) -> Message:
    kind = message.type.removesuffix("MessageChunk").lower()
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(kind)
    if role is None:
        raise InputError(f"message {number} is a {message.type!r} message, which has no place in a chat template")
    if isinstance(message, AIMessage):
        content = message.content
        if not isinstance(content, str):
            content = [block for block in content if isinstance(block, str) or block.get("type") not in _LEFT_OUT]
        # A call that could not be read is shown as the model wrote it.
        texts = [_text(content, number), *(call["args"] or "" for call in message.invalid_tool_calls)]
        return Message(role, "\n".join(filter(None, texts)), calls_of(message))
    text = _text(message.content, number)
    if isinstance(message, ToolMessage):
        return Message(role, text, tool_call_id=short_id(message.tool_call_id), name=message.name)
    return Message(role, text)


def _text(content: str | list[str | dict[str, Any]], number: int) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content:
        kind, text = ("text", block) if isinstance(block, str) else (block.get("type", "text"), block.get("text"))
        if kind != "text" or not isinstance(text, str):
            raise InputError(f"message {number} holds a {kind!r} block; this model reads text only")
        texts.append(text)
    return "".join(texts)


# Tools.


def openai_tools(tools: Sequence[AnyTool], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """The tools' descriptions, their schemas without references."""
    described = list[dict[str, Any]]()
    for tool in (convert_to_openai_tool(tool, strict=strict) for tool in tools):
        function = dict(tool["function"])
        if "$defs" in (function.get("parameters") or {}):  # they become a part of a larger schema
            schema = dereference_refs(function["parameters"])
            function["parameters"] = {key: value for key, value in schema.items() if key != "$defs"}
        described.append({**tool, "function": function})
    return described


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


# Structured output.

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, method: Method, include_raw: bool
) -> Runnable[Any, Any]:
    """The chat model followed by checks and a parser.

    Raises:
        InputError: an unknown method.
    """
    if method not in get_args(Method):
        raise InputError(f"method={method!r} is not known; use one of {', '.join(get_args(Method))}")
    options: dict[str, Any] = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    kind: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    parser: BaseOutputParser[Any]
    if method == "function_calling":
        model = chat.bind_tools([schema], tool_choice="any", **options)
        by_name = JsonOutputKeyToolsParser(key_name=_name(schema), first_tool_only=True)
        parser = by_name if kind is None else PydanticToolsParser(tools=[kind], first_tool_only=True)
    else:
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            named = {"name": _name(schema), "schema": convert_to_json_schema(schema)}
            form = {"type": "json_schema", "json_schema": named}
        model = chat.bind(response_format=form, **options)
        parser = JsonOutputParser() if kind is None else PydanticOutputParser(pydantic_object=kind)
    parse = RunnableGenerator(_delivered, _adelivered) | parser
    if not include_raw:
        return model | parse
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parse, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def structured_by(
    made: Runnable[Any, Any], model: BaseChatModel, guard: BaseChatModel, *, include_raw: bool
) -> Runnable[Any, Any]:
    """The steps that a model built for its structured output, around its guard.

    Raises:
        InputError: the model has no place in these steps that LangChain's own ways of building give it.
    """
    places = list[Any]()

    def around(step: Any) -> Any:
        held: Any = step  # of a type that no check narrows
        if step is model or (isinstance(step, RunnableBinding) and held.bound is model):
            places.append(step)
            guarded: Any = guard if step is model else held.model_copy(update={"bound": guard})
            return guarded if include_raw else guarded | RunnableGenerator(_delivered, _adelivered)
        if isinstance(step, RunnableSequence):
            return cast("Any", RunnableSequence(*map(around, held.steps)))
        if isinstance(step, RunnableParallel):
            return RunnableParallel({name: around(one) for name, one in held.steps__.items()})
        return held

    steps = around(made)
    if not places:
        raise InputError(
            f"{model.get_name()} builds its structured output in a way that cannot be guarded; bind a tool or a "
            "response_format to the guard and parse its answer"
        )
    return steps


def _name(schema: dict[str, Any] | type) -> str:
    return convert_to_openai_tool(schema)["function"]["name"]


def _delivered(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """The messages as they come, once each is known to be the model's own and, at the end, whole."""
    text = ""
    for message in messages:
        text += _checked(message, text)
        yield message


async def _adelivered(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    text = ""
    async for message in messages:
        text += _checked(message, text)
        yield message


def _checked(message: AIMessage, before: str) -> str:
    """A message's text.

    Raises:
        LowConfidenceError: a router put an abstention in its place.
        OutputParserException: the answer was cut before it was complete; parsers would repair it in silence.
    """
    verdict, text = stage_verdict(message), str(message.text)
    if verdict is not None and is_withheld(verdict):
        raise LowConfidenceError(verdict, draft=verdict.draft, advice=f"{text!r} is no object.")
    if message.response_metadata.get("finish_reason") == "length":
        whole = before + text
        try:
            json.loads(whole)
        except ValueError:
            raise OutputParserException(
                f"the answer reached max_tokens before it was complete: {whole!r}; raise max_tokens", llm_output=whole
            ) from None
    return text
