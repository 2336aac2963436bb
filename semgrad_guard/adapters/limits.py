"""The time that one call of a model may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.guard.timing import ain_time, in_time

T = TypeVar("T")


class Limit:
    """A deadline that begins now; None sets none. Limits of calls around this one count as well."""

    def __init__(self, seconds: float | None) -> None:
        self._stop = None if seconds is None else Stop(seconds)

    @contextmanager
    def counting(self) -> Generator[None]:
        """While this lasts, a model that works here stops once the time is over.

        Raises:
            DeadlineExceededError: whatever works here raises it at its next check.
        """
        if self._stop is None:
            yield
            return
        with stopping(self._stop):
            yield


def in_time_left(work: Callable[[], T]) -> T:
    """What work returns that knows no deadlines (a server's answer), if it does so within the limits that count here.

    Raises:
        DeadlineExceededError: it is late, and left behind.
    """
    stop = current_stop()
    return in_time(work, stop) if stop else work()


async def ain_time_left(work: Awaitable[T]) -> T:
    """Like `in_time_left`, for what can be awaited; it is cancelled where it is late."""
    stop = current_stop()
    return await (ain_time(work, stop) if stop else work)
