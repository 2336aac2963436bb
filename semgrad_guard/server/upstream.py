"""Other servers with OpenAI's protocol: an upstream that writes drafts, and a target that is asked instead.

What they send is not believed: statuses, lengths, forms and streams are checked, and each fault is an `UpstreamError`.
A client's Authorization never reaches them; their own keys are the operator's.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

import httpx

from semgrad_guard.calibration.call_options import call_options, cutting_options
from semgrad_guard.engine.prompts.reasoning import HeldText
from semgrad_guard.errors import InputError, UpstreamError
from semgrad_guard.guard import Draft, Reply, Waiting, external
from semgrad_guard.records import Message, ToolCall
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.cuts import Cuts
from semgrad_guard.server.event_stream import events
from semgrad_guard.server.protocol import CUTS
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.sent import (
    Sent,
    SentCall,
    SentChoice,
    SentChunk,
    SentCompletion,
    SentFunction,
    SentMessage,
    SentNames,
    SentUsage,
)

_LARGEST = 16 * 2**20
"""Bytes of an answer."""
_KEPT_BACK = frozenset({"semgrad_guard", "stream", "stream_options", "model", "n"})
_OF_THE_PROMPT = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "continue_final_message", "truncate_prompt_tokens"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "documents", "functions", "transforms"),
        *("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "thinking_budget"),
        *("reasoning_budget", "web_search_options", "plugins"),
        *("system", "template", "prompt", "context", "images", "raw", "suffix"),  # Ollama's
    )
)
"""Fields that change the prompt that the other server renders. The scorer would score another prompt."""
_MESSAGE = 300
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses of servers that are busy or start anew, and of the proxies before them."""
_LONGEST_WAIT = 3600
_CHAT = "chat/completions"


S = TypeVar("S", bound=Sent)


class RemoteServer:
    """Another server. `timeout` are the seconds in which it must say something.

    Raises:
        InputError: the URL is none.
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
            raise InputError(f"{url!r} is no URL such as http://localhost:8000/v1") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InputError(f"{url!r} is no URL such as http://localhost:8000/v1")
        self.url = str(parsed).rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout, self._transport = timeout, transport
        self._client: httpx.AsyncClient | None = None

    async def chat(self, body: Mapping[str, Any], *, words: bool = True) -> dict[str, Any]:
        """The answer to a chat completion; `words` as for `asked`.

        Raises:
            UpstreamError: there is none that can be read.
        """
        async with self.asked(_CHAT, body, words=words) as response:
            return _json(await _limited(response))

    async def chat_stream(self, body: Mapping[str, Any], *, words: bool = True) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed chat completion, to its proper end: [DONE], or a reason why the answer has ended
        (`transformers serve` says no more than that). `words` as for `asked`.

        Raises:
            UpstreamError: it failed, or broke off.
        """
        async with self.asked(_CHAT, body, words=words) as response:
            finished = False
            async for kind, data in events(_pieces(response)):
                if data == b"[DONE]":
                    return
                chunk = _json(data)
                if kind == b"error" or chunk.get("error") is not None or chunk.get("object") == "error":
                    raise UpstreamError(f"{self.url} failed while it answered", passing=True)
                finished = finished or _finishes(chunk)
                yield chunk
        if not finished:
            raise UpstreamError(f"{self.url} broke its stream off before the end", passing=True)

    async def close(self) -> None:
        """Let go of its connections."""
        if self._client is not None:
            await self._client.aclose()

    @asynccontextmanager
    async def asked(self, route: str, body: Mapping[str, Any], *, words: bool = True) -> AsyncGenerator[httpx.Response]:
        """The answer of one of its routes, which has begun with status 200.

        An error holds the server's own words, if `words`. They may quote what a model wrote: a call that it could not
        read, JSON that follows no schema.

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
                    raise await _refusal(self.url, response, words=words)
                yield response
            finally:
                await asyncio.shield(response.aclose())
        except httpx.TimeoutException as error:
            raise UpstreamError(f"{self.url} said nothing for {self._timeout:g} s", passing=True) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            said = f"{self.url} cannot be reached, or broke off ({type(error).__name__})"
            raise UpstreamError(said, passing=True) from error


@dataclass(frozen=True, eq=False)
class Upstream:
    """Another server that writes the drafts, and the local model that scores them."""

    server: RemoteServer
    scheduler: Scheduler

    async def drafts(self, asked: Asked) -> Sequence[Draft[Answer]]:
        """The scored drafts of a request."""
        body = {**asked.sent, "model": asked.model, "n": asked.count, "stream": False}
        found = await self.server.chat(body, words=asked.cuts is None)
        answers = _answers(found, asked.count, self.server.url)
        return [await self.scored(asked, answer) for answer in answers]

    def live(self, asked: Asked) -> RemoteAnswer:
        """An answer that is being written there."""
        return RemoteAnswer(self, asked)

    async def scored(self, asked: Asked, answer: Answer) -> Draft[Answer]:
        """An answer with its score. Of calls the text is not known, so that they cannot be scored."""
        if answer.tool_calls:
            scored = await self.scheduler.unscored(
                answer.text, "a tool call from elsewhere cannot be scored", asked.form
            )
        elif asked.unread is not None:
            scored = await self.scheduler.unscored(answer.text, asked.unread, asked.form)
        elif changed := _changes_of_the_prompt(asked.body):
            reason = f"{', '.join(changed)} of the request changed the prompt, and the scorer does not know how"
            scored = await self.scheduler.unscored(answer.text, reason, asked.form)
        else:
            cut, reasoned = answer.finish_reason == "length", answer.reasoning is not None
            scored = await self.scheduler.scored(
                asked.conversation, answer.text, form=asked.form, cut=cut, reasoned=reasoned
            )
        thought = answer.reasoning or scored.verdict.reasoning
        told = {"reasoning": thought or None, "options": call_options(asked.sent)}
        verdict = scored.verdict.model_copy(update={"tool_calls": answer.tool_calls, **told})
        answer = replace(answer, text=verdict.text)
        if asked.cuts:
            answer = replace(answer, pieces=await self._pieces(answer))
        return Draft(verdict, answer, scored.prompt)

    async def _pieces(self, answer: Answer) -> tuple[str, ...]:
        """What each token adds to an answer: by its log-probabilities, or as the local model would write it."""
        tokens = [entry.get("token") for entry in answer.logprobs or ()]
        written = [token for token in tokens if isinstance(token, str)]
        return tuple(written) if "".join(written) == answer.text else await self.scheduler.pieces(answer.text)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client asks of another server: the body as it came, and as this one reads it.

    Where answers may be withheld there are `cuts`, which are made here, and the other server ends an answer after
    `limit` tokens whatever the client asks. `unread` says why the scorer cannot read it.
    """

    body: Mapping[str, Any]
    model: str
    count: int
    conversation: tuple[Message, ...]
    form: Any
    unread: str | None = None
    cuts: Cuts | None = None
    limit: int = 256

    @property
    def sent(self) -> dict[str, Any]:
        """The fields that the other server is sent, but for those of one way of asking.

        Raises:
            InputError: one of them would cut a draft off that is to be decided on as a whole.
        """
        body = _forwarded(self.body)
        if self.cuts is None:
            return body
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        body = {name: value for name, value in body.items() if name not in CUTS}
        if found := cutting_options(body):
            said = f"this server decides on whole answers; cut them with stop and max_tokens, not {found[0][:64]}"
            raise InputError(said)
        return body | {limit: self.limit}


class RemoteAnswer:
    """An answer that another server is writing: its pieces, then its scored draft (`AsyncLiveDraft`)."""

    def __init__(self, upstream: Upstream, asked: Asked) -> None:
        self._upstream, self._asked = upstream, asked
        body = {**asked.sent, "model": asked.model, "stream": True, "stream_options": {"include_usage": True}}
        self._chunks = upstream.server.chat_stream(body, words=asked.cuts is None)
        self._text, self._calls, self._places = "", list[SentFunction](), dict[int | None, int]()
        self._finish, self._usage = "stop", SentUsage()
        self._logprobs: list[dict[str, Any]] = []
        self._reasoning: str | None = None
        self._held = HeldText()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for found in self._chunks:
            if piece := self._taken(_read(SentChunk, found, self._upstream.server.url)):
                self._text += piece
                if shown := self._held.add(piece):  # of what is held, the scorer tells the answer at the end
                    yield shown

    async def draft(self) -> Draft[Answer]:
        """The whole answer with its score."""
        answer = Answer(
            text=self._text,
            tool_calls=tuple(map(_call, self._calls)),
            finish_reason=self._finish,
            logprobs=self._logprobs or None,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            reasoning="" if self._reasoning is None and self._usage.reasoned else self._reasoning,
        )
        return await self._upstream.scored(self._asked, answer)

    async def aclose(self) -> None:
        """Hang up; harmless at any time."""
        await cast("Any", self._chunks).aclose()

    def _taken(self, chunk: SentChunk) -> str:
        """The text of one chunk; what else it says is kept."""
        self._usage = chunk.usage or self._usage
        pieces: list[str] = []
        for choice in chunk.choices or ():
            if choice.index != 0:
                raise UpstreamError(f"{self._upstream.server.url} sent several answers, and one was asked for")
            delta = choice.delta or SentMessage()
            self._finish = choice.finish_reason or self._finish
            if (thought := delta.thought) is not None:
                self._reasoning = (self._reasoning or "") + thought
            self._logprobs += (choice.logprobs and choice.logprobs.content) or []
            for call in delta.tool_calls or ():
                self._add(call)
            pieces.append(delta.content or delta.refusal or "")
        return "".join(pieces)

    def _add(self, sent: SentCall) -> None:
        """Put a piece to its call. Some servers number no call (Gemini's), or all alike: a new id is a new call."""
        place = self._places.get(sent.index, -1)
        if place < 0 or (sent.id and self._calls[place].id not in ("", sent.id)):
            place = self._places[sent.index] = len(self._calls)
            self._calls.append(SentFunction())
        known, more = self._calls[place], sent.function or SentNames()
        self._calls[place] = SentFunction(
            id=sent.id or known.id,
            name=known.name + (more.name or ""),
            arguments=known.arguments + (more.arguments or ""),
        )


@dataclass(frozen=True, eq=False)
class RemoteTarget:
    """Another server that is asked for what is not let through; its answers are passed on unscored."""

    server: RemoteServer
    model: str

    async def ask(
        self, body: Mapping[str, Any], waiting: Sequence[Waiting[Answer]]
    ) -> Sequence[Reply[Answer] | Exception]:
        """One answer for each draft that waits, or an error in its place."""
        asked = {**_forwarded(body), "model": self.model, "stream": False}
        asked.pop("logprobs", None)
        asked.pop("top_logprobs", None)
        found = await asyncio.gather(*(self.server.chat(asked) for _ in waiting), return_exceptions=True)
        return [self._reply(each) for each in found]

    def _reply(self, found: dict[str, Any] | BaseException) -> Reply[Answer] | Exception:
        if isinstance(found, BaseException):
            if not isinstance(found, Exception):
                raise found
            return found
        try:
            (answer,) = _answers(found, 1, self.server.url)
        except UpstreamError as error:
            return error
        said = external(answer.text, tool_calls=answer.tool_calls) if answer.tool_calls else answer.text
        return Reply(said, answer)


def _forwarded(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that another server is sent as they came, those that are not known here among them."""
    return {name: value for name, value in body.items() if name not in _KEPT_BACK}


def _changes_of_the_prompt(body: Mapping[str, Any]) -> list[str]:
    return [name for name in call_options(body) if name.rpartition(".")[2] in _OF_THE_PROMPT]


def _answers(found: Mapping[str, Any], count: int, url: str) -> list[Answer]:
    """The answers in a completion.

    Raises:
        UpstreamError: it holds another number of them, or what cannot be read.
    """
    sent = _read(SentCompletion, found, url)
    if len(sent.choices) != count:
        raise UpstreamError(f"{url} sent {len(sent.choices)} answers, and {count} were asked for")
    usage = sent.usage or SentUsage()
    return [_answer(choice, usage, alone=count == 1) for choice in sent.choices]


def _answer(choice: SentChoice, usage: SentUsage, *, alone: bool) -> Answer:
    message = choice.message
    sent = [(call.id, call.function or SentNames()) for call in message.tool_calls or ()]
    calls = [SentFunction(id=id or "", name=of.name or "", arguments=of.arguments or "") for id, of in sent]
    return Answer(
        text=message.content or message.refusal or "",
        tool_calls=tuple(map(_call, calls)),
        finish_reason=choice.finish_reason or "stop",
        logprobs=None if choice.logprobs is None else choice.logprobs.content,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens if alone else None,
        together=None if alone else usage.completion_tokens,
        reasoning="" if message.thought is None and usage.reasoned else message.thought,
    )


def _call(sent: SentFunction) -> ToolCall:
    try:
        arguments: Any = json.loads(sent.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise UpstreamError("the upstream sent a tool call whose arguments are no JSON") from error
    if not isinstance(arguments, dict) or not sent.name:
        raise UpstreamError("the upstream sent a tool call that cannot be read")
    return ToolCall(sent.name, cast("dict[str, Any]", arguments), sent.id or None)


def _read(kind: type[S], found: Mapping[str, Any], url: str) -> S:
    try:
        sent = kind.model_validate(found)
        sent.model_dump_json()  # half a character is no text
    except (ValueError, RecursionError) as error:
        raise UpstreamError(f"{url} sent an answer that cannot be read") from error
    return sent


def _finishes(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk says why its answer has ended."""
    choices: Any = chunk.get("choices")
    found = cast("list[Any]", choices) if isinstance(choices, list) else []
    return any(isinstance(each, dict) and cast("Any", each).get("finish_reason") for each in found)


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > _LARGEST:
            raise UpstreamError(f"{response.url.host} sent more than {_LARGEST} bytes")
        yield piece


async def _limited(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in _pieces(response)])


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
        json.dumps(found, allow_nan=False)  # what cannot be written as JSON cannot be passed on
    except (ValueError, RecursionError) as error:
        raise UpstreamError("the upstream sent what is no JSON") from error
    if not isinstance(found, dict):
        raise UpstreamError("the upstream sent JSON that is no object")
    return cast("dict[str, Any]", found)


async def _refusal(url: str, response: httpx.Response, *, words: bool) -> UpstreamError:
    """What to say of a status. The words of other statuses than these may hold what is nobody's business (keys)."""
    status, said = response.status_code, ""
    if words and status in (400, 404, 413, 422):
        try:
            found: Any = _json(await _limited(response))
            said = f": {found['error']['message']}"[:_MESSAGE]
        except (UpstreamError, KeyError, TypeError):
            said = ""
    said = f"{url} answered with status {status}{said}"
    return UpstreamError(said, status=status, passing=status in _PASSING, retry_after=_retry_after(response.headers))


def _retry_after(headers: httpx.Headers) -> int | None:
    """The seconds after which to ask again, as far as another server says so: as a number, or as a date."""
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return min(int(said[:6]), _LONGEST_WAIT)
    try:
        seconds = (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(1, min(math.ceil(seconds), _LONGEST_WAIT))
