"""`Turn`: work that waits for a model's thread, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from semgrad_guard.engine.interruption import current_stop, stopping
from semgrad_guard.errors import SemGradGuardError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class Turn(Generic[T]):
    """Work in the context (and so under the stops) of whoever submitted it. Its future is settled once."""

    context: Context
    future: Future[T] = field(default_factory=Future[Any])

    def begin(self) -> bool:
        """Whether somebody still waits; from now on, the thread has to settle it."""
        return self.future.set_running_or_notify_cancel()

    def run(self, work: Callable[[], R]) -> R:
        """What `work` returns in this turn's context, under the stops of the running thread as well."""
        own = current_stop()

        def under_both() -> R:
            with stopping(own):
                current_stop().check()
                return work()

        return self.context.run(under_both)

    def settle(self, work: Callable[[], T]) -> None:
        """What `work` returns, or raises, is what whoever waits gets."""
        try:
            result = self.run(work)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self.fail(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Whoever waits gets this error."""
        # The frames of our own errors hold the states of the model.
        self.future.set_exception(error.with_traceback(None) if isinstance(error, SemGradGuardError) else error)
