"""Lazy streams, which are read later and elsewhere: their calls belong to the turn, and to the step, that asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, contextmanager
from inspect import isasyncgen, isgenerator
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

from llama_index_instrumentation.span import active_span_id

from semgrad_guard.guard import current_stop, stopping

T = TypeVar("T")
_bound = WeakSet[Any]()
"""The streams that know their step."""


class Opens(Protocol):
    """A turn: what is done while it is open is part of it."""

    def open(self) -> AbstractContextManager[Any]: ...


def resumed(pieces: Generator[T], turn: Opens) -> Generator[T]:
    """The pieces of a lazy stream, whose calls belong to `turn` in whatever context they are asked for."""
    return _resumed(pieces, turn, current_stop())


def _resumed(pieces: Generator[T], turn: Opens, stop: Any) -> Generator[T]:
    try:
        while True:
            with turn.open(), stopping(stop):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


def aresumed(pieces: AsyncGenerator[T], turn: Opens) -> AsyncGenerator[T]:
    """As `resumed`, for an async stream."""
    return _aresumed(pieces, turn, current_stop())


async def _aresumed(pieces: AsyncGenerator[T], turn: Opens, stop: Any) -> AsyncGenerator[T]:
    try:
        while True:
            with turn.open(), stopping(stop):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


def asked_here(pieces: Generator[T]) -> Generator[T]:
    """The pieces of a lazy stream, whose call belongs to the step that asks for it now, whoever reads it."""
    return _asked_in(pieces, active_span_id.get())


def _asked_in(pieces: Generator[T], span: str | None) -> Generator[T]:
    try:
        while True:
            with _within(span):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


def aasked_here(pieces: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """As `asked_here`, for an async stream."""
    return _aasked_in(pieces, active_span_id.get())


async def _aasked_in(pieces: AsyncGenerator[T], span: str | None) -> AsyncGenerator[T]:
    try:
        while True:
            with _within(span):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


def bound_to(pieces: Any, span: str) -> Any:
    """A stream whose calls belong to the step that returned it: engines ask their model when it is first read."""
    if pieces in _bound:
        return pieces
    bound: Any = pieces
    if isgenerator(pieces):
        bound = _asked_in(cast("Generator[Any]", pieces), span)
    elif isasyncgen(pieces):
        bound = _aasked_in(cast("AsyncGenerator[Any]", pieces), span)
    if bound is not pieces:
        _bound.add(bound)
    return bound


@contextmanager
def _within(span: str | None) -> Generator[None]:
    token = active_span_id.set(span)
    try:
        yield
    finally:
        active_span_id.reset(token)
