"""Lazy streams, which are read later and elsewhere: their calls belong to the turn and to the step that began them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import isasyncgen, isgenerator
from typing import Any, TypeVar, cast
from weakref import WeakSet

from llama_index_instrumentation.span import active_span_id

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[None]]
_bound = WeakSet[Any]()
"""The streams that know their step."""


def begun_here(pieces: Generator[T]) -> Generator[T]:
    """The pieces of a lazy stream, whose call belongs to the current step, in whatever context they are read."""
    return _read_in(pieces, partial(_within, active_span_id.get()))


def abegun_here(pieces: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """As `begun_here`, for an async stream."""
    return _aread_in(pieces, partial(_within, active_span_id.get()))


def bound_to(pieces: Any, span: str) -> Any:
    """A stream whose calls belong to the step that returned it: engines run their model when it is first read."""
    if pieces in _bound:
        return pieces
    if isgenerator(pieces):
        bound: Any = _read_in(cast("Generator[Any]", pieces), partial(_within, span))
    elif isasyncgen(pieces):
        bound = _aread_in(cast("AsyncGenerator[Any]", pieces), partial(_within, span))
    else:
        return pieces
    _bound.add(bound)
    return bound


def _read_in(pieces: Generator[T], context: Context) -> Generator[T]:
    """The pieces, every one of which is read in a context of its own that has ended when it goes out."""
    try:
        while True:
            with context():
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


async def _aread_in(pieces: AsyncGenerator[T], context: Context) -> AsyncGenerator[T]:
    try:
        while True:
            with context():
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


@contextmanager
def _within(span: str | None) -> Generator[None]:
    token = active_span_id.set(span)
    try:
        yield
    finally:
        active_span_id.reset(token)
