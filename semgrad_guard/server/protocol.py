"""The requests of OpenAI's protocol, checked, and translated into the records of the engine.

A field that this server does not know, or cannot honour, is refused. A field that changes no answer is accepted.

Why: docs/decisions.md#0143
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import from_json

from semgrad_guard.adapters.calls import BLOCKS, AnswerForm, short_id
from semgrad_guard.calibration.binding import HARMLESS, NEUTRAL
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.errors import InputError
from semgrad_guard.records import Message, ToolCall
from semgrad_guard.server.answers import Cuts, arguments_in
from semgrad_guard.server.gate import problem_of

LONGEST_STOP = 256
"""Characters of a stop string: the model waits while all its spellings in the vocabulary are found."""
CUTS = ("max_completion_tokens", "max_tokens", "stop")
"""The fields by which a client cuts an answer off."""
_OF_MACHINES = frozenset({"num_ctx", "num_batch", "num_thread", "num_gpu", "use_mmap", "use_mlock", "keep_alive"})
"""Ollama's fields for memory and threads, which Open WebUI may send to any server. They change no answer here."""
_OURS = frozenset({"model", "stream", "n", "semgrad_guard"})
"""The fields that decide how we answer: they must be valid also where another server answers."""
_SCORED = frozenset({"messages", "tools", "tool_choice", "response_format"})
"""The fields that make the prompt."""
_SEEDS = 2**62


class Sent(BaseModel):
    """A part of a request; further fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Function(Sent):
    """A tool's description."""

    name: StrictStr = Field(min_length=1, max_length=256)
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Sent):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class _Earlier(BaseModel):
    """A part of an earlier message. Fields that other servers or clients have added are left out of the prompt."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class CalledFunction(_Earlier):
    """The function that an earlier answer called; `arguments` are JSON in a text."""

    name: StrictStr
    arguments: StrictStr


class Call(_Earlier):
    """An earlier answer's call."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Earlier):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[dict[str, Any]] | None = None
    name: StrictStr | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: StrictStr | None = None
    refusal: StrictStr | None = None

    def as_message(self, number: int) -> Message:
        """The message as the engine reads it.

        Raises:
            InputError: it holds something other than text.
        """
        role = "system" if self.role == "developer" else self.role
        content = self.content if self.content is not None else self.refusal
        if role == "assistant" and isinstance(content, list):  # as chat templates leave earlier reasoning out
            content = [part for part in content if part.get("type") not in BLOCKS]
        text = _text(content, number)
        calls = tuple(_call(call, number, place) for place, call in enumerate(self.tool_calls or ()))
        return Message(role, text, tool_calls=calls, tool_call_id=short_id(self.tool_call_id), name=self.name)


class StreamOptions(BaseModel):
    """The parts of a stream next to the answer."""

    model_config = ConfigDict(frozen=True, extra="allow")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None


class Switches(Sent):
    """Chat templates' switch for thinking: either name turns it, whatever the template's own is. Other options of the
    template are the operator's to set."""

    enable_thinking: StrictBool | None = None
    thinking: StrictBool | None = None


class NoSettings(Sent):
    """The guard's settings for one request: there are none, as no request changes a decision."""


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: StrictStr
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = Field(default=None, max_length=512)
    tool_choice: StrictStr | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=20)
    n: StrictInt | None = Field(default=None, ge=1)
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=0)
    chat_template_kwargs: Switches | None = None
    reasoning_effort: StrictStr | None = Field(default=None, max_length=32)
    semgrad_guard: NoSettings | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_left(cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """In a request that another server answers, leave a field out that cannot be read; the context notes why."""
        left: dict[str, str] | None = info.context
        try:
            return read(value)
        except ValidationError as error:
            name, question = str(info.field_name), _question(value)
            if left is None or name in _OURS or (name == "messages" and not question):
                raise
            place, problem = problem_of(error)
            left[name] = f"{'.'.join(filter(None, (name, place)))}: {problem}"
            return read(question) if name == "messages" else None

    @property
    def count(self) -> int:
        """How many answers the client wants."""
        return self.n or 1

    @property
    def question(self) -> str | None:
        """The user's last message; None where it is no text."""
        users = (message for message in reversed(self.messages) if message.role == "user")
        content = next(users, self.messages[-1]).content
        return content if isinstance(content, str) else None

    def require_known(self) -> None:
        """Refuse fields that our own engine does not honour.

        Raises:
            InputError: the request has such fields.
        """
        sent = {**((self.stream_options and self.stream_options.model_extra) or {}), **(self.model_extra or {})}
        given = {name: value for name, value in sent.items() if value is not None}
        for name, neutral in NEUTRAL.items():
            if name in given and given.pop(name) not in neutral:
                raise InputError(f"{name!r} is not supported by this server; leave it out").about(name)
        if unknown := sorted(set(given) - HARMLESS - _OF_MACHINES):
            named = ", ".join(repr(name[:64]) for name in unknown[:8])
            raise InputError(f"unknown field: {named}; leave it out").about(unknown[0][:64])

    def conversation(self) -> tuple[Message, ...]:
        """The messages as the engine reads them.

        Raises:
            InputError: one holds something other than text.
        """
        return tuple(message.as_message(number) for number, message in enumerate(self.messages))

    def form(self) -> AnswerForm:
        """The form that the answer must have.

        Raises:
            InputError: a choice of no tool at hand, or an unknown form.
        """
        choice = self.tool_choice
        if isinstance(choice, Mapping):
            chosen: Any = choice.get("function")
            if choice.get("type") != "function" or not isinstance(chosen, Mapping):
                raise InputError('tool_choice is "auto", "none", "required" or names one function').about("tool_choice")
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        for tool in tools:
            tool["function"].pop("strict", None)
        return AnswerForm.of({"tools": tools, "tool_choice": choice, "response_format": self.response_format})

    def switches(self) -> dict[str, Any]:
        """The chat template's options about the reasoning before the answer."""
        given = self.chat_template_kwargs or Switches()
        turned = [value for value in (given.enable_thinking, given.thinking) if value is not None]
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**({"thinking": "on" if any(turned) else "off"} if turned else {}), **effort}

    @property
    def cuts(self) -> Cuts:
        """Where the answer is to be cut off.

        Raises:
            InputError: at an empty string.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Cuts(max_tokens=self.max_completion_tokens or self.max_tokens, stop=tuple(stop or ()))

    def options(self, usual: GenerationOptions, *, uncut: bool = False) -> GenerationOptions:
        """How to generate: the operator's options, changed by those of the request; without its cuts, if `uncut`.

        A higher `max_tokens` than the operator's is lowered (`lowered`).

        Raises:
            InputError: too many stop strings, or too long ones.
        """
        cuts = self.cuts
        if len(cuts.stop) > 4:
            raise InputError(f"stop takes up to 4 strings, not {len(cuts.stop)}").about("stop")
        if max(map(len, cuts.stop), default=0) > LONGEST_STOP:
            raise InputError(f"a stop string has up to {LONGEST_STOP} characters").about("stop")
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": None if self.seed is None else self.seed % _SEEDS,
        }
        if not uncut:
            limit = self.lowered(usual.max_tokens) or cuts.max_tokens
            options |= {"max_tokens": limit, "stop": None if self.stop is None else cuts.stop}
        return replace(usual, **{name: value for name, value in options.items() if value is not None})

    def lowered(self, limit: int) -> int | None:
        """The operator's limit, where the request sets a higher one; else None."""
        return limit if (self.cuts.max_tokens or 0) > limit else None

    @property
    def wants_json(self) -> bool:
        """Whether the answer is to be JSON, which no text can replace."""
        return self.response_format is not None and self.response_format.get("type") in ("json_schema", "json_object")


class ScoreRequest(Sent):
    """The body of POST /v1/score: a text, as the answer to a conversation."""

    model: StrictStr | None = None
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    text: StrictStr = Field(min_length=1)
    by: Literal["sentence"] | None = None
    cut: StrictBool = False


class FeedbackRequest(Sent):
    """The body of POST /v1/feedback: whether a delivered answer was right. The log knows whether it drew it."""

    decision_id: StrictStr = Field(min_length=1, max_length=64)
    right: StrictBool
    grader: StrictStr | None = Field(default=None, max_length=128)


class DecisionsRequest(Sent):
    """The query of GET /v1/decisions. `since` is as for the command; `after` names a decision."""

    since: str | None = Field(default=None, max_length=64)
    action: Literal["answer", "escalate", "abstain"] | None = None
    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = Field(default=None, max_length=64)


def parse_json(body: bytes) -> dict[str, Any]:
    """A body as plain data; pydantic's parser takes no NaN, no half of a character, and some 200 levels.

    Raises:
        InputError: it is not a JSON object, or holds such things.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # no 1e999 either
    except ValueError as error:
        raise InputError(f"the body is not JSON that this server reads: {error}") from error
    if not isinstance(value, dict):
        raise InputError("the body is a JSON object")
    return cast("dict[str, Any]", value)


def _text(content: str | Sequence[Mapping[str, Any]] | None, number: int) -> str:
    """The text of a message's content.

    Raises:
        InputError: a part of it is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "refusal") or not isinstance(text, str):
            place = f"messages.{number}.content"
            raise InputError(f"{place}: a part of it has no text; this model reads text only").about(place)
        texts.append(text)
    return "".join(texts)


def _call(call: Call, number: int, place: int) -> ToolCall:
    arguments = arguments_in(call.function.arguments)
    if arguments is None:
        field = f"messages.{number}.tool_calls.{place}.function.arguments"
        raise InputError(f"{field}: it is not a JSON object").about(field)
    return ToolCall(call.function.name, arguments, short_id(call.id))


# Requests that another server answers. It may do more than our engine, and checks its requests itself: only the fields
# that we need are read. A request that the scorer cannot read is passed on, and its answer has no score.


@dataclass(frozen=True)
class Forwarded:
    """A request as far as we read it. `unread` is the reason why its answer cannot be scored; `left` has the fields
    that are not in the `request`, each with the reason."""

    request: ChatRequest
    conversation: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    unread: str | None = None
    left: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Read a request that another server answers.

        Raises:
            ValidationError: a field that decides how we answer is wrong.
        """
        left = dict[str, str]()
        request = ChatRequest.model_validate(body, context=left)
        unread = [problem for name, problem in left.items() if name in _SCORED]
        try:
            conversation, form = request.conversation(), request.form()
        except InputError as error:
            unread.append(str(error))
            conversation, form = (), AnswerForm()
        if unread:
            return cls(request, unread=f"the scorer cannot read the request ({'; '.join(unread)})", left=left)
        return cls(request, conversation, form, left=left)


def _question(messages: Any) -> list[dict[str, str]]:
    """The user's last message as far as it is text; none where these are not messages at all."""
    listed = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not all(isinstance(message, dict) for message in listed):
        return []
    texts = [message.get("content") for message in listed if message.get("role") == "user"]
    text = texts[-1] if texts and isinstance(texts[-1], str) else ""
    return [{"role": "user", "content": text}] if listed else []
