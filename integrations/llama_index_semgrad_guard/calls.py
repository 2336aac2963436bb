"""Which model calls belong to which query: a context variable that threads and tasks of one query share."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TypeVar

from llama_index_instrumentation import get_dispatcher

from semgrad_guard import Generation, Verdict

T = TypeVar("T")
_dispatcher = get_dispatcher(__name__)


class ModelCall:
    """One answer of a `SemGradLLM`, scored when its verdict is first read."""

    def __init__(self, generation: Generation, assess: Callable[[Generation], Verdict]) -> None:
        self.generation, self._assess = generation, assess

    @cached_property
    def verdict(self) -> Verdict:
        """The scored draft; the decision about it is not made here."""
        return self.score()

    @_dispatcher.span
    def score(self) -> Verdict:
        """Scoring, as a span of its own in traces."""
        return self._assess(self.generation)


class CallCollector:
    """The calls made in one query, in the order in which they ended; with `last_only`, earlier ones are dropped."""

    def __init__(self, *, last_only: bool) -> None:
        self._last_only, self._calls, self._lock = last_only, list[ModelCall](), threading.Lock()

    def add(self, call: ModelCall) -> None:
        """Take a call down; safe from any thread."""
        with self._lock:
            if self._last_only:
                # An answer keeps its hidden states until it is scored; those never scored should go at once.
                self._calls.clear()
            self._calls.append(call)

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The calls so far."""
        with self._lock:
            return tuple(self._calls)


_collector: ContextVar[CallCollector | None] = ContextVar("semgrad_guard_calls", default=None)


@contextmanager
def collecting(*, last_only: bool) -> Generator[CallCollector]:
    """Collect the calls made in this block, and in the threads and tasks that inherit its context."""
    with _joining(CallCollector(last_only=last_only)) as collector:
        yield collector


def collected(pieces: Generator[T], collector: CallCollector) -> Generator[T]:
    """The pieces of a lazy stream, whose calls `collector` collects in whatever context they are asked for."""
    try:
        while True:
            with _joining(collector):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


async def acollected(pieces: AsyncGenerator[T], collector: CallCollector) -> AsyncGenerator[T]:
    """As `collected`, for an async stream."""
    try:
        while True:
            with _joining(collector):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


def current_collector() -> CallCollector | None:
    """Whoever collects calls here; None where every call is scored by itself."""
    return _collector.get()


@contextmanager
def _joining(collector: CallCollector) -> Generator[CallCollector]:
    token = _collector.set(collector)
    try:
        yield collector
    finally:
        _collector.reset(token)
