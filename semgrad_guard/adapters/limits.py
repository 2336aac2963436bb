"""The time that one call of a model may take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from semgrad_guard.engine.interruption import Stop, stopping


@contextmanager
def within(seconds: float | None) -> Generator[None]:
    """While this lasts, a model stops once the time is over; limits of calls around this one count as well.

    Raises:
        DeadlineExceededError: whatever works here raises it at its next check.
    """
    if seconds is None:
        yield
        return
    with stopping(Stop(seconds)):
        yield
