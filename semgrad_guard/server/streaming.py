"""Answers as server-sent events: a comment keeps a waiting stream alive, and a client that leaves ends the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semgrad_guard.guard import Outcome
from semgrad_guard.server import completions
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.http_errors import ENDING, HttpError
from semgrad_guard.server.service import Call, Service

T = TypeVar("T")
Step = str | Outcome[Answer]
_DONE = "data: [DONE]\n\n"
_BEAT = ": waiting\n\n"


class ClientGoneError(Exception):
    """There is no client left to answer."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; a client that leaves cancels it.

    Raises:
        ClientGoneError: the client has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def streamed(
    request: Request,
    service: Service,
    call: Call,
    *,
    request_id: str,
    beat: float,
    report: Callable[[BaseException], HttpError],
) -> Response:
    """A stream. Its headers wait for its first step, up to the first beat: until then an error has a status.

    Args:
        request: the client's.
        service: answers it.
        call: the request as it was read.
        request_id: names it.
        beat: seconds after which a stream without an event sends a comment.
        report: the error that a client gets for an exception.
    """
    steps = service.steps(call)
    first = asyncio.ensure_future(anext(aiter(steps)))
    try:
        done, _ = await unless_gone(request, asyncio.wait({first}, timeout=beat))
    except (ClientGoneError, asyncio.CancelledError):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    step = first.result() if done else None
    verdict = completions.headers([step]) if isinstance(step, Outcome) and call.request.count == 1 else {}
    headers = {"cache-control": "no-store", "x-accel-buffering": "no", **verdict}

    async def again() -> AsyncIterator[Step]:
        yield await first
        async for following in steps:
            yield following

    async def events() -> AsyncGenerator[str]:
        """Chunks as events; an error after the beginning is the last of them."""
        try:
            async for chunk in completions.chunks(call, again(), request_id=request_id):
                yield _event(chunk)
        except Exception as error:  # noqa: BLE001 - the status has been sent: the stream holds the error
            yield _event(report(error).body)
        finally:
            await steps.aclose()
        yield _DONE

    return _Events(_beating(events(), beat, waits=not done), media_type="text/event-stream", headers=headers)


async def _beating(events: AsyncGenerator[str], beat: float, *, waits: bool) -> AsyncGenerator[str]:
    """The events, and a comment whenever there was none for so long; one at once, if a client `waits` already."""
    if waits:
        yield _BEAT
    following: asyncio.Future[str] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({following}, timeout=beat))[0]:
                yield _BEAT
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


class _Events(StreamingResponse):
    """A stream that ends as soon as its client has left, in every version of ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        ends = False
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends, and the time to finish is over
            ends = not sending.done()
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
        if ends:
            last = _event(ENDING.body) + _DONE
            await send({"type": "http.response.body", "body": last.encode(), "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
