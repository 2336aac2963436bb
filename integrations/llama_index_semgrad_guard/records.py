"""LlamaIndex's messages, tools and responses as ours, ours as LlamaIndex's; and verdicts in its instrumentation."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, PrivateAttr

from semgrad_guard import METADATA_KEY, Generation, Message, ToolCall, Verdict
from semgrad_guard.adapters.calls import new_id, short_id
from semgrad_guard.adapters.traces import EvaluationLog, verdict_of_record
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Terms

if TYPE_CHECKING:  # it needs the extra `tracing`
    from opentelemetry._logs import LoggerProvider

Prompt = str | Sequence[ChatMessage]
"""What an LLM is asked."""
REASONING = "reasoning_content"
"""Where `raw` holds the reasoning before an answer."""

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
    given: Any = messages
    if not isinstance(given, list | tuple) or not all(isinstance(one, ChatMessage) for one in cast("list[Any]", given)):
        raise InputError(f"a prompt is a text (complete) or a list of ChatMessages (chat), not {messages!r:.60}")
    conversation = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    names = {call.id: call.name for message in conversation for call in message.tool_calls}
    return tuple(
        message if message.tool_call_id is None else replace(message, name=names.get(message.tool_call_id))
        for message in conversation
    )


def calls_tools(conversation: Sequence[Message]) -> bool:
    """Whether a conversation holds calls of tools."""
    return any(message.tool_calls for message in conversation)


def raw_record(generation: Generation, model: str) -> dict[str, Any]:
    """The content of `raw`, whether or not the answer has been scored: plain JSON types."""
    read, produced = len(generation.prompt.ids), generation.completion_tokens
    usage = {"prompt_tokens": read, "completion_tokens": produced, "total_tokens": read + produced}
    return {"model": model, "finish_reason": generation.finish_reason, "usage": usage}


def get_verdict(response: Any) -> Verdict | None:
    """The verdict on a delivered response, None if it carries none; its text is the response's own.

    After an escalation it is the target's own verdict, with the draft's as `escalated_from`. Reads the responses of a
    `SemGradLLM`, of guarded engines and of agents. The last piece of a stream carries the record.

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
            message = getattr(response, "message", getattr(response, "response", None))  # the latter of an agent
            calls = _calls(message, 1) if isinstance(message, ChatMessage) else ()
            return verdict_of_record(place[METADATA_KEY], text_of(response), calls)
    return None


class Chunk(NamedTuple):
    """A whole answer, or one so far: its text and its thought, in a stream the newest piece of either, and at the end
    the record, the calls and the log-probabilities of its tokens."""

    text: str
    delta: str | None = None
    thought: str = ""
    thought_delta: str | None = None
    record: dict[str, Any] | None = None
    calls: Sequence[ToolCall] = ()
    logprobs: list[list[LogProb]] | None = None


def chat_response(chunk: Chunk) -> ChatResponse:
    """An answer as LlamaIndex's chat methods return it; the record is next to the message, never in it.

    Calls are blocks of the message. Parts of LlamaIndex look for them in its further fields, in OpenAI's form.
    """
    thought = chunk.thought or (chunk.record or {}).get(REASONING, "")
    calls = [
        ToolCallBlock(tool_call_id=call.id or new_id(), tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in chunk.calls
    ]
    blocks = [*([ThinkingBlock(content=thought)] if thought else []), TextBlock(text=chunk.text), *calls]
    functions = [{"name": call.tool_name, "arguments": json.dumps(call.tool_kwargs)} for call in calls]
    pairs = zip(calls, functions, strict=True)
    written = [{"id": call.tool_call_id, "type": "function", "function": function} for call, function in pairs]
    fields = {"tool_calls": written} if calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=fields)
    thinking = chunk.thought_delta
    more = _verdict_record(chunk.record) if thinking is None else {"thinking_delta": thinking}
    return ChatResponse(
        message=message, raw=chunk.record, delta=chunk.delta, logprobs=chunk.logprobs, additional_kwargs=more
    )


def completion(chunk: Chunk) -> CompletionResponse:
    """An answer as LlamaIndex's completion methods return it."""
    more = _verdict_record(chunk.record)
    return CompletionResponse(
        text=chunk.text, raw=chunk.record, delta=chunk.delta, logprobs=chunk.logprobs, additional_kwargs=more
    )


def text_of(response: Any) -> str:
    """A response's text; that of a stream has been read. LlamaIndex's `str` of a missing text is "None"."""
    if isinstance(response, Response):
        return response.response or ""
    if isinstance(response, StreamingResponse | AsyncStreamingResponse):
        return response.response_txt or ""
    return (response.message.content or "") if isinstance(response, ChatResponse) else str(response)


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


# Tools: shown to a model, and its calls of them in the messages of responses.


_REQUIRED = "structure_required"
"""An option of ours: LlamaIndex's streams of structures take its own, `tool_required`, out of the call."""


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
        tool_required = kwargs.pop(_REQUIRED, False) or tool_required
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto")
        question = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([] if question is None else [question])]
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, **({"tools": described, "tool_choice": choice} if tools else {}), **kwargs}

    def structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """As LlamaIndex's, which leaves the model free to answer without the structure."""
        return super().structured_predict(output_cls, prompt, self._owing(output_cls, llm_kwargs), **prompt_args)

    async def astructured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """As `structured_predict`, on the event loop."""
        return await super().astructured_predict(output_cls, prompt, self._owing(output_cls, llm_kwargs), **prompt_args)

    def stream_structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """As `structured_predict`, in partial objects."""
        return super().stream_structured_predict(output_cls, prompt, self._owing(output_cls, llm_kwargs), **prompt_args)

    async def astream_structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """As `stream_structured_predict`, on the event loop."""
        options = self._owing(output_cls, llm_kwargs)
        return await super().astream_structured_predict(output_cls, prompt, options, **prompt_args)

    def _owing(self, output_cls: Any, options: dict[str, Any] | None) -> dict[str, Any]:
        """The options of a call whose answer owes a structure: as a call of a tool or, without tools, as JSON."""
        if self.metadata.is_function_calling_model:
            return {_REQUIRED: True, **(options or {})}
        schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
        return {"response_format": {"type": "json_schema", "json_schema": schema}, **(options or {})}

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[BaseTool], allow_parallel_tool_calls: bool = False, **kwargs: Any
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


# Instrumentation: an event for each verdict, its log and its trace.

Source = Literal["llm", "query_engine", "chat_engine"]
_log = logging.getLogger("semgrad_guard")
_dispatcher = get_dispatcher(__name__)


class UncertaintyEvent(BaseEvent):
    """A verdict, as soon as there is one; `source` is the part that decided (an LLM without a router: scored)."""

    source: Source
    record: dict[str, Any]
    """The verdict's `metadata()`: no text, and a withheld draft only where `keep_draft` is set."""

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this event."""
        return "UncertaintyEvent"


class UncertaintyEventHandler(BaseEventHandler):
    """Logs every verdict to the logger "semgrad_guard": let through as information, anything else as a warning.

        get_dispatcher().add_event_handler(UncertaintyEventHandler())

    It only reports: LlamaIndex swallows the errors of event handlers. The record is the log record's attribute
    `semgrad_guard`, for formatters that write JSON.
    """

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this handler."""
        return "UncertaintyEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Log the event if it is a verdict."""
        if not isinstance(event, UncertaintyEvent):
            return
        record = event.record
        level = logging.INFO if record["action"] == "answer" else logging.WARNING
        names = ("uncertainty", "threshold", "confidence")
        numbers = ", ".join(f"{name} {'none' if record[name] is None else f'{record[name]:.4g}'}" for name in names)
        advice = "" if record["details"]["enforced"] else " (not enforced)"
        message = f"{event.source}: {record['action']}{advice}; {numbers}; {record['reason'] or record['status']}"
        _log.log(level, message, extra={"semgrad_guard": record})


class UncertaintyTracer(BaseEventHandler):
    """Writes every verdict into the span of the engine or the LLM that decided.

        get_dispatcher().add_event_handler(UncertaintyTracer())

    The span is the current one: OpenInference's, if its LlamaIndex instrumentor (4.6.1 or later) is on, or the one
    around the call. Its attributes are the verdict's fields (`semgrad_guard.uncertainty`, `semgrad_guard.action`, ...);
    a log event `gen_ai.evaluation.result` is tied to it. No text is written. Needs the extra `tracing`.

    Args:
        logger_provider: where events go; default: OpenTelemetry's global one.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    _evaluations: EvaluationLog = PrivateAttr()

    def __init__(self, *, logger_provider: LoggerProvider | None = None) -> None:
        super().__init__()
        self._evaluations = EvaluationLog("llama_index_semgrad_guard", logger_provider=logger_provider)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this handler."""
        return "UncertaintyTracer"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Write the event if it is a verdict."""
        if isinstance(event, UncertaintyEvent):
            self._evaluations.write(event.record)


def reporting(terms: Terms, source: Source) -> Terms:
    """The terms, each decision by which is an event as well."""

    def notify(verdict: Verdict) -> None:
        report(verdict, source, keep_draft=terms.keep_draft)
        if terms.notify is not None:
            terms.notify(verdict)

    return replace(terms, notify=notify)


def report(verdict: Verdict, source: Source, *, keep_draft: bool = False) -> None:
    """Send a verdict to LlamaIndex's event handlers."""
    _dispatcher.event(UncertaintyEvent(source=source, record=verdict.metadata(keep_draft=keep_draft)))
