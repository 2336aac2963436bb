"""The flow for answers that are streamed: live where nothing may be withheld, else the outcome alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Protocol, TypeVar

from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.guard.flow import (
    UNWRITTEN,
    Ask,
    AsyncAsk,
    Draft,
    Outcome,
    Pending,
    aasking,
    asking,
    not_written,
    one,
)
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.timing import adrive, cancelling, drive

A = TypeVar("A")
"""The frontend's object."""
P = TypeVar("P")
"""A piece of a stream."""
P_co = TypeVar("P_co", covariant=True)


class LiveDraft(Protocol[P_co, A]):
    """An answer that is being written: its pieces, and the scored draft once they have ended."""

    def __iter__(self) -> Iterator[P_co]: ...

    def draft(self) -> Draft[A]: ...

    def close(self) -> None: ...


class AsyncLiveDraft(Protocol[P_co, A]):
    """Like `LiveDraft`, on the event loop."""

    def __aiter__(self) -> AsyncIterator[P_co]: ...

    async def draft(self) -> Draft[A]: ...

    async def aclose(self) -> None: ...


def run_stream(
    terms: Terms, start: Callable[[], LiveDraft[P, A]], ask: Ask[A] | None = None, *, stop: Stop | None = None
) -> Generator[P | Outcome[A]]:
    """The pieces as they come, where nothing may be withheld, and the outcome last; else the outcome alone.

    Raises:
        Exception: whatever drafting raises; the one in the outcome's place.
    """
    stop = terms.stop() if stop is None else stop
    with stopping(stop):
        live = start()
    try:
        for piece in live:
            if not terms.withholds:
                yield piece
        with stopping(stop):
            outcome = one(drive(Pending([live.draft()], terms).concluded(asking(ask))))
    except UNWRITTEN as error:
        outcome = not_written(error, terms)
    finally:
        live.close()
    yield outcome


async def arun_stream(
    terms: Terms,
    start: Callable[[], Awaitable[AsyncLiveDraft[P, A]]],
    ask: AsyncAsk[A] | None = None,
    *,
    stop: Stop | None = None,
) -> AsyncGenerator[P | Outcome[A]]:
    """Like `run_stream`, on the event loop; closing it, or cancelling its task, stops the model."""
    stop = terms.stop() if stop is None else stop
    with cancelling(stop):
        with stopping(stop):
            live = await start()
        try:
            async for piece in live:
                if not terms.withholds:
                    yield piece
            with stopping(stop):
                outcome = one(await adrive(Pending([await live.draft()], terms).concluded(aasking(ask))))
        except UNWRITTEN as error:
            outcome = not_written(error, terms)
        finally:
            await live.aclose()
    yield outcome
