"""The answers of other servers: as much of OpenAI's protocol as is read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from semgrad_guard.adapters.messages import reasoning_of, tells_reasoning
from semgrad_guard.errors import UpstreamError
from semgrad_guard.records import ToolCall
from semgrad_guard.server.answers import Answer


class Sent(BaseModel):
    """A part of another server's answer; fields that are not read here are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SentFunction(Sent):
    """A call, or its part that has come so far."""

    id: StrictStr = ""
    name: StrictStr = ""
    arguments: StrictStr = ""


class SentNames(Sent):
    """A function's name and arguments; pieces of them in a stream."""

    name: StrictStr | None = None
    arguments: StrictStr | None = None


class SentCall(Sent):
    """A call, or a piece of one."""

    index: StrictInt | None = None
    id: StrictStr | None = None
    function: SentNames | None = None


class SentMessage(Sent):
    """An answer, or a piece of one. A call in the form that came before `tool_calls` would be lost: it is refused.

    Servers have many names for reasoning, and several forms: further fields are kept to be looked at.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    content: StrictStr | None = None
    refusal: StrictStr | None = None
    tool_calls: list[SentCall] | None = None
    function_call: None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @property
    def thought(self) -> str | None:
        """Its reasoning; "" where only its existence is known, None where there is no sign of it."""
        return reasoning_of(dict(self))


class SentLogprobs(Sent):
    """Log-probabilities in OpenAI's form; they are passed on."""

    content: list[dict[str, Any]] | None = None


class SentUsage(Sent):
    """How many tokens were read and written, as the other server counts."""

    model_config = ConfigDict(frozen=True, extra="allow")

    prompt_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    completion_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None

    @property
    def reasoned(self) -> bool:
        """Whether some of the tokens were reasoning."""
        return tells_reasoning(dict(self))


class SentChoice(Sent):
    """One answer."""

    message: SentMessage
    finish_reason: StrictStr | None = None
    logprobs: SentLogprobs | None = None


class SentCompletion(Sent):
    """A whole completion."""

    choices: list[SentChoice]
    usage: SentUsage | None = None


class SentDelta(Sent):
    """A piece of one answer."""

    index: StrictInt = 0
    delta: SentMessage | None = None
    finish_reason: StrictStr | None = None
    logprobs: SentLogprobs | None = None


class SentChunk(Sent):
    """A chunk of a stream; the last one may hold no answer, and the tokens that were used."""

    choices: list[SentDelta] | None = None
    usage: SentUsage | None = None


S = TypeVar("S", bound=Sent)


def answers_in(body: Mapping[str, Any], count: int, url: str) -> list[Answer]:
    """The answers in a completion.

    Raises:
        UpstreamError: it holds another number of them, or cannot be read.
    """
    sent = read(SentCompletion, body, url)
    if len(sent.choices) != count:
        raise UpstreamError(f"{url} sent {len(sent.choices)} answers, and {count} were requested")
    usage = sent.usage or SentUsage()
    return [_answer(choice, usage, alone=count == 1) for choice in sent.choices]


def _answer(choice: SentChoice, usage: SentUsage, *, alone: bool) -> Answer:
    message = choice.message
    sent = [(call.id, call.function or SentNames()) for call in message.tool_calls or ()]
    calls = [SentFunction(id=id or "", name=of.name or "", arguments=of.arguments or "") for id, of in sent]
    return Answer(
        text=message.content or message.refusal or "",
        tool_calls=tuple(map(call_of, calls)),
        finish_reason=choice.finish_reason or "stop",
        logprobs=None if choice.logprobs is None else choice.logprobs.content,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens if alone else None,
        together=None if alone else usage.completion_tokens,
        reasoning="" if message.thought is None and usage.reasoned else message.thought,
    )


def call_of(sent: SentFunction) -> ToolCall:
    """A call that is complete.

    Raises:
        UpstreamError: it cannot be read.
    """
    try:
        arguments: Any = json.loads(sent.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise UpstreamError("the upstream sent a tool call whose arguments are not JSON") from error
    if not isinstance(arguments, dict) or not sent.name:
        raise UpstreamError("the upstream sent a tool call that cannot be read")
    return ToolCall(sent.name, cast("dict[str, Any]", arguments), sent.id or None)


def read(kind: type[S], body: Mapping[str, Any], url: str) -> S:
    """A body as one of the records above.

    Raises:
        UpstreamError: it cannot be read.
    """
    try:
        sent = kind.model_validate(body)
        sent.model_dump_json()  # half a character is not text
    except (ValueError, RecursionError) as error:
        raise UpstreamError(f"{url} sent an answer that cannot be read") from error
    return sent
