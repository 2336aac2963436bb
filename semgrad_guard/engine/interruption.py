"""Deadlines and cancellation: work asks `current_stop()` whether to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from semgrad_guard.errors import AnswerCancelledError, DeadlineExceededError


class Stop:
    """Says when work has to end: at a deadline, or when somebody cancels it. Safe to share between threads."""

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout, self._cancelled = timeout, threading.Event()
        self._end = None if timeout is None else time.monotonic() + timeout

    def cancel(self) -> None:
        """End the work at its next check."""
        self._cancelled.set()

    @property
    def remaining(self) -> float | None:
        """Seconds left; None without a deadline."""
        return None if self._end is None else self._end - time.monotonic()

    def check(self) -> None:
        """Raise if the work has to end."""
        if self._cancelled.is_set():
            raise AnswerCancelledError("the answer was cancelled")
        if self._end is not None and time.monotonic() >= self._end:
            raise DeadlineExceededError(f"the answer was not there within {self._timeout:g} s")


_stop: ContextVar[Stop | None] = ContextVar("semgrad_guard_stop", default=None)


@contextmanager
def stopping(stop: Stop) -> Generator[None]:
    """The time of work that `stop` may end."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def current_stop() -> Stop | None:
    """What may end the work in progress."""
    return _stop.get()
