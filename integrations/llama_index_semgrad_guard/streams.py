"""Streamed responses: live ones, whose record comes with their end, and buffered ones in a single piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_args

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)

from llama_index_semgrad_guard.authorship import Delivery
from llama_index_semgrad_guard.calls import Turn
from llama_index_semgrad_guard.lazy_streams import aresumed, resumed
from llama_index_semgrad_guard.routing import Routing
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, Outcome, Steps, Work, arun_stream, off_loop, run_stream

Whole = Response | PydanticResponse


@dataclass
class TextResponse(Response):
    """A response whose text may be empty: the `str` of LlamaIndex's own would be "None"."""

    def __str__(self) -> str:
        return self.response or ""


@dataclass
class TextStream(StreamingResponse):
    """The same, as a stream."""

    def __str__(self) -> str:
        super().__str__()
        return self.response_txt or ""


@dataclass
class AsyncTextStream(AsyncStreamingResponse):
    """The same, as an async stream."""

    async def _async_str(self) -> str:
        await super()._async_str()
        return self.response_txt or ""


class LivePieces:
    """An answer that is being written: its pieces as they come, and its draft when they have ended."""

    def __init__(self, pieces: Generator[str], turn: Turn, routing: Routing) -> None:
        self._inner, self._turn, self._routing = resumed(pieces, turn), turn, routing
        self._source = pieces
        self._seen = list[str]()

    def __iter__(self) -> Iterator[str]:
        for piece in self._inner:
            self._seen.append(_text(piece))
            yield piece

    def draft(self) -> Draft[Any]:
        """The scored draft."""
        return self._routing.draft(self._turn, _streamed(self._seen, self._source))

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self._turn.stop()
        self._inner.close()


class AsyncLivePieces:
    """As `LivePieces`, on the event loop."""

    def __init__(self, pieces: AsyncGenerator[str], turn: Turn, routing: Routing) -> None:
        self._inner, self._turn, self._routing = aresumed(pieces, turn), turn, routing
        self._source = pieces
        self._seen = list[str]()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for piece in self._inner:
            self._seen.append(_text(piece))
            yield piece

    async def draft(self) -> Draft[Any]:
        """The scored draft."""
        return await off_loop(lambda: self._routing.draft(self._turn, _streamed(self._seen, self._source)))

    async def aclose(self) -> None:
        """Stop the model; harmless at any time."""
        self._turn.stop()
        await self._inner.aclose()


def _streamed(seen: Sequence[str], source: Any) -> Delivery:
    """A streamed answer, without empty pieces, such as some models' last ones."""
    return Delivery("".join(seen), pieces=tuple(filter(None, seen)), stream=source)


def live(
    pieces: Generator[str], turn: Turn, routing: Routing, metadata: dict[str, Any], *, stop: Any
) -> Generator[str]:
    """The pieces as they come; once they have ended, `metadata` holds the record. Closing them stops the model."""
    # A live stream is delivered: it is never escalated.
    steps = run_stream(routing.terms, lambda: LivePieces(pieces, turn, routing), stop=stop)
    try:
        for step in steps:
            if isinstance(step, Outcome):
                metadata.update(routing.attached({}, step.verdict, turn))
            else:
                yield step
    finally:
        steps.close()


async def alive(
    pieces: AsyncGenerator[str], turn: Turn, routing: Routing, metadata: dict[str, Any], *, stop: Any
) -> AsyncGenerator[str]:
    """As `live`, on the event loop."""

    async def start() -> AsyncLivePieces:
        return AsyncLivePieces(pieces, turn, routing)

    steps = arun_stream(routing.terms, start, stop=stop)
    try:
        async for step in steps:
            if isinstance(step, Outcome):
                metadata.update(routing.attached({}, step.verdict, turn))
            else:
                yield step
    finally:
        await steps.aclose()


_DUE = "a text or a Response is due (of an LLM's answer, its text: llm.complete(...).text)"


def require_response(response: Any) -> RESPONSE_TYPE:
    """An engine's result, if it is a response.

    Raises:
        InputError: it is something else; engines of the user's return any object.
    """
    if not isinstance(response, get_args(RESPONSE_TYPE)):
        raise InputError(f"the engine returned a {type(response).__name__}; {_DUE}")
    return response


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"the engine's response holds a {type(value).__name__} in the place of a text; {_DUE}")
    return value


def whole(response: RESPONSE_TYPE) -> Steps[tuple[Whole, Delivery]]:
    """A response with its stream, if it has one, read to the end; and its delivery.

    Raises:
        InputError: it holds no text, or its stream is async and the reader is not.
    """
    if isinstance(response, (StreamingResponse, AsyncStreamingResponse)):
        pieces: list[str] | None = None
        stream: Any = response.response_gen
        if is_live(response):
            asynchronous = isinstance(response, AsyncStreamingResponse)
            pieces = yield Work(_not_async, lambda: _aread(stream)) if asynchronous else Work(lambda: list(stream))
        text = _text(response.response_txt or "") if pieces is None else "".join(map(_text, pieces))
        read = Response(text, response.source_nodes, response.metadata)
        return read, replace(_streamed(pieces or (), stream), text=text, holder=read)
    if isinstance(response, PydanticResponse):
        return response, Delivery(str(response), response)
    return response, Delivery("" if response.response is None else _text(response.response), response)


def _not_async() -> NoReturn:
    raise InputError("the engine answered a sync query with an async stream; use aquery")


async def _aread(stream: Any) -> list[str]:
    return [piece async for piece in stream]


def is_live(response: RESPONSE_TYPE) -> bool:
    """Whether a response is still to be written."""
    return isinstance(response, (StreamingResponse, AsyncStreamingResponse)) and response.response_txt is None


def deliver(response: Whole, *, streamed: bool) -> RESPONSE_TYPE:
    """The response in the form in which the inner engine gave it: a stream becomes a stream of one piece."""
    if not streamed or isinstance(response, PydanticResponse):
        return response
    return TextStream((text for text in [response.response or ""]), response.source_nodes, response.metadata)


def adeliver(response: Whole, *, streamed: bool) -> RESPONSE_TYPE:
    """As `deliver`, for the async methods."""
    if not streamed or isinstance(response, PydanticResponse):
        return response

    async def pieces() -> AsyncGenerator[str]:
        yield response.response or ""

    return AsyncTextStream(pieces(), response.source_nodes, response.metadata)
