"""Streamed responses: live ones that are decided about at their end, and buffered ones in a single piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)

from llama_index_semgrad_guard.calls import CallCollector, acollected, collected
from llama_index_semgrad_guard.routing import Router

Whole = Response | PydanticResponse


def live(response: StreamingResponse, collector: CallCollector, router: Router) -> StreamingResponse:
    """The stream as it is; once it has ended, its metadata holds the record."""
    metadata = dict(response.metadata or {})

    def pieces() -> Generator[str]:
        text = ""
        for piece in collected(response.response_gen, collector):
            text += piece
            yield piece
        metadata.update(router.attached({}, router.decided(text, collector.calls)))

    return StreamingResponse(pieces(), response.source_nodes, metadata)


def alive(response: AsyncStreamingResponse, collector: CallCollector, router: Router) -> AsyncStreamingResponse:
    """As `live`, for an async stream."""
    metadata = dict(response.metadata or {})

    async def pieces() -> AsyncGenerator[str]:
        text = ""
        async for piece in acollected(response.response_gen, collector):
            text += piece
            yield piece
        verdict = await asyncio.to_thread(router.decided, text, collector.calls)
        metadata.update(router.attached({}, verdict))

    return AsyncStreamingResponse(pieces(), response.source_nodes, metadata)


async def awhole(response: RESPONSE_TYPE) -> Whole:
    """A response with its stream, if it has one, read to the end."""
    if isinstance(response, AsyncStreamingResponse):
        return await response.get_response()
    if isinstance(response, StreamingResponse):
        return await asyncio.to_thread(response.get_response)
    return response


def deliver(response: Whole, streamed: bool) -> RESPONSE_TYPE:
    """The response in the form in which the inner engine gave it: a stream becomes a stream of one piece."""
    if not streamed or isinstance(response, PydanticResponse):
        return response

    def pieces() -> Generator[str]:
        yield response.response or ""

    return StreamingResponse(pieces(), response.source_nodes, response.metadata)


def adeliver(response: Whole, streamed: bool) -> RESPONSE_TYPE:
    """As `deliver`, for the async methods."""
    if not streamed or isinstance(response, PydanticResponse):
        return response

    async def pieces() -> AsyncGenerator[str]:
        yield response.response or ""

    return AsyncStreamingResponse(pieces(), response.source_nodes, response.metadata)
