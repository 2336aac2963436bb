"""The time that one call of a model may take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from semgrad_guard.engine.interruption import Stop, stopping


class Limit:
    """A deadline that begins now; None sets none. Limits of calls around this one count as well."""

    def __init__(self, seconds: float | None) -> None:
        self._stop = None if seconds is None else Stop(seconds)

    @contextmanager
    def counting(self) -> Generator[None]:
        """While this lasts, a model that works here stops once the time is over.

        Raises:
            DeadlineExceededError: the model raises it at its next check.
        """
        if self._stop is None:
            yield
            return
        with stopping(self._stop):
            yield
