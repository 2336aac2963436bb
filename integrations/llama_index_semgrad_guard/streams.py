"""Streamed responses: live ones, whose record comes with their end, and buffered ones in a single piece."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
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
from llama_index_semgrad_guard.calls import ModelCall
from llama_index_semgrad_guard.routing import Routing, sealed
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, Iterated, Outcome, Steps, Stop, StreamSteps, Work, streamed

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


class LivePieces(Iterated[str]):
    """An answer that is being written: its pieces as they come, whose calls belong to `turn`, and its draft."""

    def __init__(self, make: Callable[[], Any], amake: Callable[[], Any], turn: Turn, routing: Routing) -> None:
        super().__init__(make, amake)
        self._turn, self._routing = turn, routing
        self._seen = list[str]()

    def next(self) -> Work:
        """As `Live.next`."""
        return Work.of(self._of_the_turn)

    def _of_the_turn(self) -> Steps[list[str] | None]:
        with self._turn.open():  # not while the reader has a piece
            pieces = yield super().next()
        self._seen += map(_text, pieces or ())
        return pieces

    @property
    def seen(self) -> Delivery:
        """The answer so far, without empty pieces, such as some models' last ones."""
        return _streamed(self._seen, self._pieces)

    def draft(self) -> Work:
        """The scored draft."""
        return Work(lambda: self._routing.draft(self._turn, self.seen))

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        self._turn.stop()
        return super().close()


class GuardedPieces(LivePieces):
    """The sentences that leave while the engine's answer is being written, and its draft, in the object of `hold`.

    Behind a sentence that ends the answer the model is left: closing the pieces hangs up.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[str]],
        amake: Callable[[], AsyncIterator[str]],
        turn: Turn,
        routing: Routing,
        *,
        hold: Callable[[str], Any],
    ) -> None:
        super().__init__(make, amake, turn, routing)
        self._hold, self._is_reading = hold, False
        self._ended: ModelCall | None = None

    def next(self) -> Work:
        """As `Live.next`."""
        return self._sealed(self._let_through)

    def _let_through(self) -> Steps[Sequence[Any] | None]:
        if self._ended is not None:
            return None
        self._is_reading = True
        pieces = yield super().next().in_time()
        self._is_reading = False
        leaving = self._turn.leaving
        if pieces is None or leaving is None:
            return pieces
        new, self._ended = leaving.next(self._is_the_answer)
        return new

    def _is_the_answer(self, call: ModelCall) -> bool:
        """Whether the engine has passed on the text of this call, and would deliver it alone if it ended here."""
        ended, seen = copy.copy(self._turn), self.seen
        ended.calls = [*self._turn.calls, call]
        return call.text == seen.text and self._routing.counting.is_alone(ended, seen, call)

    def draft(self) -> Work:
        """The scored draft."""
        return self._sealed(self._held)

    def close(self) -> Work:
        """As `LivePieces.close`; pieces that are late are still being read, and end with their model."""
        return Work.at_once(self._turn.stop) if self._is_reading else super().close()

    def _held(self) -> Steps[Draft[Any]]:
        text = self.seen.text
        if self._ended is not None:
            self._turn.end_with(self._ended)
            text = self._ended.text
        delivery = replace(self.seen, text=text, holder=self._hold(text))
        return (yield Work(lambda: self._routing.draft(self._turn, delivery)))

    def _sealed(self, steps: Callable[[], Steps[Any]]) -> Work:
        return Work.of(lambda: sealed(steps(), self._turn, self._routing.terms))


def _streamed(seen: Sequence[str], source: Any) -> Delivery:
    return Delivery("".join(seen), pieces=tuple(filter(None, seen)), stream=source)


def live(
    pieces: Generator[str] | AsyncGenerator[str],
    turn: Turn,
    routing: Routing,
    metadata: dict[str, Any],
    *,
    stop: Stop,
) -> StreamSteps[str, None]:
    """The pieces as they come; once they have ended, `metadata` holds the record. Closing them stops the model."""

    def show(step: Any) -> Sequence[str]:
        if not isinstance(step, Outcome):
            return (step,)
        metadata.update(routing.attached({}, step.verdict, turn))
        return ()

    # A live stream is delivered: it is never escalated.
    return streamed(routing.terms, LivePieces(lambda: pieces, lambda: pieces, turn, routing), show=show, stop=stop)


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
