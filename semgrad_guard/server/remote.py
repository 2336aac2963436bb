"""`RemoteServer`: another server with OpenAI's protocol, and the records of as much of its answers as is read here.

Its answers are not trusted: statuses, lengths, forms and streams are checked, and each fault is an `UpstreamError`. A
client's Authorization never reaches it; its key is the operator's. Its address is in no error, as clients get these.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Self, cast

import httpx
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from semgrad_guard.adapters.calls import reasoning_of, tells_reasoning
from semgrad_guard.errors import InputError, UpstreamError
from semgrad_guard.records import ToolCall
from semgrad_guard.server.answers import Answer, arguments_in

_LARGEST = 16 * 2**20
"""Bytes of an answer."""
_MESSAGE = 300
_PLACE = re.compile(r"\S*(?:[/\\@]|[a-z\d]:\d{2,5}\b|\d+(?:\.\d+){3})\S*", re.IGNORECASE)
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses of servers that are busy or restart, and of the proxies in front of them."""
_LONGEST_WAIT = 3600
_CHAT = "chat/completions"
_BOM = b"\xef\xbb\xbf"


class RemoteServer:
    """Another server. `timeout` are the seconds in which it must send something.

    Raises:
        InputError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise InputError(f"{url!r} is not a URL such as http://localhost:8000/v1") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InputError(f"{url!r} is not a URL such as http://localhost:8000/v1")
        self.url = str(parsed).rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout, self._transport = timeout, transport
        self._client: httpx.AsyncClient | None = None

    async def chat(self, body: Mapping[str, Any], *, words: bool = True) -> dict[str, Any]:
        """The answer to a chat completion; `words` as for `open`.

        Raises:
            UpstreamError: there is no answer that can be read.
        """
        async with self.open(_CHAT, body, words=words) as response:
            return _json(await _body(response))

    async def chat_stream(self, body: Mapping[str, Any], *, words: bool = True) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed chat completion, to its proper end: a reason why the answer has ended.

        [DONE] is enough only of a server without this field: one that gives an answer up for another request sends it,
        too, and `transformers serve` sends none. `words` as for `open`.

        Raises:
            UpstreamError: it failed, or broke off.
        """
        async with self.open(_CHAT, body, words=words) as response:
            gives_reasons = finished = False
            async for kind, data in events(_pieces(response)):
                if data == b"[DONE]":
                    finished = finished or not gives_reasons
                    break
                chunk = _json(data)
                if kind == b"error" or chunk.get("error") is not None or chunk.get("object") == "error":
                    raise UpstreamError("the upstream failed while it answered", passing=True)
                reasons = _reasons(chunk)
                gives_reasons, finished = gives_reasons or bool(reasons), finished or any(reasons)
                yield chunk
        if not finished:
            raise UpstreamError("the upstream broke its stream off before the end", passing=True)

    async def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.aclose()

    @asynccontextmanager
    async def open(self, route: str, body: Mapping[str, Any], *, words: bool = True) -> AsyncGenerator[httpx.Response]:
        """The answer of one of its routes, which has begun with status 200.

        An error holds the server's own message, if `words`. That may quote the model's text: a call that the server
        could not read, JSON that follows no schema.

        Raises:
            UpstreamError: it refuses, cannot be reached, or breaks off.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self._timeout, transport=self._transport, follow_redirects=False, trust_env=False
            )
        request = self._client.build_request("POST", f"{self.url}/{route}", json=dict(body), headers=self._headers)
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise await _refusal(response, words=words, sent=body)
                yield response
            finally:
                await asyncio.shield(response.aclose())
        except httpx.TimeoutException as error:
            raise UpstreamError(f"the upstream sent nothing for {self._timeout:g} s", passing=True) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            problem = f"the upstream cannot be reached, or broke off ({type(error).__name__})"
            raise UpstreamError(problem, passing=True) from error


def _reasons(chunk: Mapping[str, Any]) -> list[Any]:
    """The reasons why answers have ended that a chunk holds; null while they are being written."""
    choices: Any = chunk.get("choices")
    listed = cast("list[Any]", choices) if isinstance(choices, list) else []
    return [choice["finish_reason"] for choice in listed if isinstance(choice, dict) and "finish_reason" in choice]


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bytes]]:
    """The kind (empty where it has none) and the data of each server-sent event that has data.

    These are events of the WHATWG's HTML standard, section 9.2: UTF-8 whatever a header names, with lines that end in
    LF or CR LF. JSON may hold other line ends (U+2028, U+0085), at which readers of text would break it.
    """
    kind, data = b"", list[bytes]()
    async for line in _lines(pieces):
        name, _, value = line.removeprefix(_BOM).partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value
        elif not line:
            if found := b"\n".join(data).strip():
                yield kind, found
            kind, data = b"", []
    if found := b"\n".join(data).strip():  # not every server ends its last event
        yield kind, found


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines without their ends; each byte is read once, however long a line is."""
    rest = list[bytes]()
    async for piece in pieces:
        *ended, last = piece.split(b"\n")
        for line in ended:
            yield b"".join((*rest, line)).removesuffix(b"\r")
            rest = []
        rest.append(last)
    yield b"".join(rest)


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > _LARGEST:
            raise UpstreamError(f"the upstream sent more than {_LARGEST} bytes")
        yield piece


async def _body(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in _pieces(response)])


def _json(data: bytes) -> dict[str, Any]:
    """An object; null where JSON has no such number (servers in Python write NaN)."""
    try:
        found = json.loads(data, parse_constant=lambda _: None)
        json.dumps(found, allow_nan=False)  # only valid JSON can be passed on
    except (ValueError, RecursionError) as error:
        raise UpstreamError("the upstream sent invalid JSON") from error
    if not isinstance(found, dict):
        raise UpstreamError("the upstream sent JSON that is not an object")
    return cast("dict[str, Any]", found)


async def _refusal(response: httpx.Response, *, words: bool, sent: Mapping[str, Any]) -> UpstreamError:
    """The error for a status. The messages of other statuses than these may hold secrets such as keys, and in those of
    these a word with a slash, an @, a port or an address may be a path, a host or an account of the operator's."""
    status, message, param = response.status_code, "", None
    if words and status in (400, 404, 413, 422):
        with suppress(UpstreamError, KeyError, TypeError):
            body: Any = _json(await _body(response))
            message = ": " + _PLACE.sub("...", str(body["error"]["message"]))[:_MESSAGE]
            param = body["error"]["param"]
    wait = response.headers.get("retry-after", "").strip()  # in seconds, or a date
    return UpstreamError(
        f"the upstream answered with status {status}{message}",
        status=status,
        passing=status in _PASSING,
        retry_after=min(int(wait[:6]), _LONGEST_WAIT) if wait.isascii() and wait.isdigit() else None,
    ).about(*([param] if isinstance(param, str) and param.partition(".")[0] in sent else []))


# Its answers.


class Sent(BaseModel):
    """A part of another server's answer; fields that are not read here are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SentFunction(Sent):
    """A function's name and arguments; pieces of them in a stream."""

    name: StrictStr | None = None
    arguments: StrictStr | None = None


class SentCall(Sent):
    """A call, or a piece of one."""

    index: StrictInt | None = None
    id: StrictStr | None = None
    function: SentFunction | None = None


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


class SentLogprobs(Sent):
    """Log-probabilities in OpenAI's form; they are passed on."""

    content: list[dict[str, Any]] | None = None


class SentUsage(Sent):
    """How many tokens were read and written, as the other server counts."""

    model_config = ConfigDict(frozen=True, extra="allow")

    prompt_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    completion_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None


class SentChoice(Sent):
    """One answer, or a piece of it in a stream."""

    index: StrictInt = 0
    message: SentMessage | None = Field(default=None, validation_alias=AliasChoices("message", "delta"))
    finish_reason: StrictStr | None = None
    logprobs: SentLogprobs | None = None


class SentBody(Sent):
    """A completion, or a chunk of one; the last chunk may hold no answer, and the tokens that were used."""

    choices: list[SentChoice] | None = None
    usage: SentUsage | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> SentBody:
        """A body, read.

        Raises:
            UpstreamError: it cannot be read.
        """
        try:
            sent = cls.model_validate(body)
            sent.model_dump_json()  # half a character is not text
        except (ValueError, RecursionError) as error:
            raise UpstreamError("the upstream sent an answer that cannot be read") from error
        return sent


def answers_in(body: Mapping[str, Any], count: int) -> list[Answer]:
    """The answers in a completion.

    Raises:
        UpstreamError: it holds another number of them, or cannot be read.
    """
    sent = SentBody.read(body)
    choices = sent.choices or ()
    if len(choices) != count or any(choice.message is None for choice in choices):
        raise UpstreamError(f"the upstream sent {len(choices)} answers, and {count} were requested")
    return [RemoteText.of(choice).answer(sent.usage, alone=count == 1) for choice in choices]


class RemoteText:
    """An answer of another server, put together from its pieces; a whole one is a single piece."""

    def __init__(self) -> None:
        self.text, self.logprobs = "", list[dict[str, Any]]()
        self.reasoning: str | None = None
        self.calls = list[SentCall]()
        self._finish, self._places = "stop", dict[int | None, int]()

    @classmethod
    def of(cls, choice: SentChoice) -> Self:
        """A whole answer."""
        made = cls()
        made.text = made.add(choice)
        made.calls = list((choice.message and choice.message.tool_calls) or ())  # which need neither numbers nor ids
        return made

    def add(self, choice: SentChoice) -> str:
        """Take in a piece: its text, which is the caller's to add, as far as it is delivered."""
        message = choice.message or SentMessage()
        self._finish = choice.finish_reason or self._finish
        if (thought := reasoning_of(dict(message))) is not None:
            self.reasoning = (self.reasoning or "") + thought
        self.logprobs += (choice.logprobs and choice.logprobs.content) or []
        for call in message.tool_calls or ():
            self._add_call(call)
        return message.content or message.refusal or ""

    def answer(self, usage: SentUsage | None, *, alone: bool = True) -> Answer:
        """The answer; the tokens are those of several together, unless it is `alone`.

        Raises:
            UpstreamError: one of its calls cannot be read.
        """
        used = usage or SentUsage()
        return Answer(
            text=self.text,
            tool_calls=tuple(map(_call, self.calls)),
            finish_reason=self._finish,
            logprobs=self.logprobs or None,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens if alone else None,
            together=None if alone else used.completion_tokens,
            reasoning="" if self.reasoning is None and tells_reasoning(dict(used)) else self.reasoning,
        )

    def _add_call(self, sent: SentCall) -> None:
        """Add a piece to its call. Some servers number no call (Gemini's), or all alike: a new id is a new call."""
        place = self._places.get(sent.index, -1)
        if place < 0 or (sent.id and self.calls[place].id not in (None, "", sent.id)):
            place = self._places[sent.index] = len(self.calls)
            self.calls.append(SentCall())
        known, more = self.calls[place].function or SentFunction(), sent.function or SentFunction()
        function = SentFunction(
            name=(known.name or "") + (more.name or ""), arguments=(known.arguments or "") + (more.arguments or "")
        )
        self.calls[place] = SentCall(id=sent.id or self.calls[place].id, function=function)


def _call(sent: SentCall) -> ToolCall:
    function = sent.function or SentFunction()
    arguments = arguments_in(function.arguments)
    if arguments is None or not function.name:
        raise UpstreamError("the upstream sent a tool call without a name, or whose arguments are not JSON")
    return ToolCall(function.name, arguments, sent.id or None)
