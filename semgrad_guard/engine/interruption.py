"""When a model must stop, and how callers wait for it: deadlines and cancellations, checked wherever it works.

A `Stop` is made where a call begins and set for the calls below with `stopping`; a context variable carries it down, so
that no function needs a parameter for it. Code that runs a model calls `current_stop().check()` between two pieces of
work: at each decoder layer, between blocks of the vocabulary, while it waits for a lock. `check` raises; holders of
resources release them in the usual way, and no result is changed. A new thread begins without the stops of its maker:
see `start_thread`.

A `Ticket` is the future of work for a model's thread; `Pieces` come from there while it works.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Generic, TypeVar

from semgrad_guard.errors import AnswerCancelledError, DeadlineExceededError, InputError, SemGradGuardError

P = TypeVar("P")
R = TypeVar("R")
S = TypeVar("S")

SLICE = 0.02
"""Seconds between two checks of a thread that waits under a stop."""
_PATIENCE = 10.0
"""Seconds that the end of the process waits for threads that may run a model."""


class Stop:
    """A time to stop: `timeout` seconds from now (None: never), or as soon as it is cancelled. Thread-safe.

    Raises:
        InputError: the timeout is not above 0.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):
            raise InputError(f"a timeout is a number of seconds above 0, or None for no limit, and not {timeout}")
        self.timeout, self._began = timeout, time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self.cancelled = False

    def cancel(self) -> None:
        """Stop the work at its next check. Harmless at any time, from any thread."""
        self.cancelled = True

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float | None:
        """Seconds that are left, 0 or more; None where there is no limit."""
        if self.cancelled:
            return 0.0
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Return if work may continue.

        Raises:
            AnswerCancelledError: it was cancelled.
            DeadlineExceededError: the time is over.
        """
        if self.cancelled:
            raise AnswerCancelledError("the call was cancelled before its answer was complete; nothing is delivered")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceededError(
                f"the answer was not complete within the {self.timeout:g} s that were allowed for it. Raise "
                "`timeout`, or ask for less: a smaller `max_tokens`, a shorter prompt, fewer samples"
            )


@dataclass(frozen=True)
class Stops:
    """All stops that count at one place: each of them may end the work."""

    stops: tuple[Stop, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stops)

    @property
    def elapsed(self) -> float | None:
        """Seconds since the first of them was made; None where there is none."""
        return max((stop.elapsed for stop in self.stops), default=None)

    @property
    def remaining(self) -> float | None:
        """Seconds until the earliest deadline, 0 or more; None where there is no limit."""
        return min((left for stop in self.stops if (left := stop.remaining) is not None), default=None)

    def check(self) -> None:
        """Return if work may continue; else raise as `Stop.check` does."""
        for stop in self.stops:
            stop.check()


_NONE = Stops()
_current: ContextVar[Stops] = ContextVar("semgrad_guard_stops", default=_NONE)


def current_stop() -> Stops:
    """The stops that count here; none of them unless a caller has set some."""
    return _current.get()


@contextmanager
def stopping(stop: Stop | Stops) -> Iterator[None]:
    """For the time of a block `stop` counts, in addition to the present ones.

    Not around a `yield` of a generator: its caller would run under the stop as well.
    """
    known = _current.get().stops
    added = stop.stops if isinstance(stop, Stops) else (stop,)
    token = _current.set(Stops((*known, *(other for other in added if other not in known))))
    try:
        yield
    finally:
        _current.reset(token)


class InterruptibleLock:
    """A re-entrant lock; a thread that waits for it heeds the current stop. For use as a context manager.

    `turn` counts how often it was taken by a thread that did not hold it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth, self.turn = 0, 0
        self._holder: threading.Thread | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the running thread holds it."""
        return self._holder is threading.current_thread()

    def __enter__(self) -> None:
        stop = current_stop()
        stop.check()
        while not self._lock.acquire(timeout=SLICE):
            stop.check()
            if self._holder is not None and not self._holder.is_alive():  # a thread of the parent, before a fork
                self._lock, self._depth, self._holder = threading.RLock(), 0, None
        self._depth += 1
        self._holder = threading.current_thread()
        self.turn += self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()


class _ModelThread(threading.Thread):
    stop: Stop


def start_thread(
    work: Callable[[], object], *, name: str, stop: Stop | None = None, context: Context | None = None
) -> threading.Thread:
    """Begin work that may run a model, in a daemon thread, so that the process need not wait for a long answer.

    Where the process ends, the work is stopped, and waited for: a thread that comes back from torch into an interpreter
    that is gone aborts the whole process ("terminate called without an active exception").

    Args:
        work: heeds the current stop.
        name: the thread's name.
        stop: counts for the work, and is cancelled where the process ends; by default one of its own.
        context: the context variables of the work; by default none are set.
    """
    stop = stop or Stop()

    def run() -> None:
        with stopping(stop):
            work()

    thread = _ModelThread(target=(context or Context()).run, args=(run,), daemon=True, name=name)
    thread.stop = stop
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _ModelThread)]
    for thread in threads:
        thread.stop.cancel()
    until = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


class Ticket(Future[R]):
    """The future of a request, or of other work for a model's thread, made in the context and under the stops of now.

    Cancelling it withdraws the request from the queue, or ends it at the next step. So `asyncio.wrap_future` passes on
    the cancellation of a task by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop()
        with stopping(self.stop):
            self.context, self.stops = copy_context(), current_stop()

    def cancel(self) -> bool:
        """As `Future.cancel`; a request that is being written gets an `AnswerCancelledError` soon."""
        self.stop.cancel()
        return super().cancel()

    def outcome(self) -> R:
        """The result, waited for under the current stops. A caller that leaves early cancels the request.

        Raises:
            AnswerInterruptedError: a stop ended it.
        """
        try:
            return waited(self, current_stop())
        except BaseException:
            self.cancel()
            raise

    # For the model's thread.

    def run(self, work: Callable[[], S]) -> S:
        """The result of `work` in the caller's context, under the stops of the running thread as well."""
        stops = current_stop()

        def under_both() -> S:
            with stopping(stops):
                current_stop().check()
                return work()

        return self.context.run(under_both)

    def settle(self, work: Callable[[], R]) -> None:
        """Give the caller the result of `work`, or its error."""
        try:
            result = self.run(work)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self.fail(error)
        else:
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give the caller this error, unless there is a result; what was begun for it ends."""
        self.stop.cancel()
        if not self.done():
            # The frames of our own errors hold the states of the model.
            self.set_exception(error.with_traceback(None) if isinstance(error, SemGradGuardError) else error)


def outcomes(tickets: Sequence[Ticket[R]]) -> list[R]:
    """The results of several requests, as `Ticket.outcome`.

    Raises:
        Exception: the first in their order; the others are then cancelled.
    """
    try:
        return [ticket.outcome() for ticket in tickets]
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise


def waited(future: Future[R], stops: Stops) -> R:
    """The result of a future, waited for under these stops.

    Raises:
        AnswerInterruptedError: a stop ended the waiting.
    """
    while stops:
        try:
            return future.result(SLICE)
        except FutureTimeoutError:
            if future.done():
                raise  # the work's own
            stops.check()
    return future.result()


class Pieces(Generic[P]):
    """Pieces from any thread, for one reader in another one or on an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: list[P] = []
        self._has_ended = False
        self._reader: Future[Sequence[P] | None] | None = None

    def put(self, piece: P) -> None:
        """One more piece; waits for nothing."""
        with self._lock:
            self._ready.append(piece)
            self._hand_over()

    def end(self) -> None:
        """There are no more."""
        with self._lock:
            self._has_ended = True
            self._hand_over()

    def next(self) -> Future[Sequence[P] | None]:
        """All pieces that are there, as soon as there is one; None behind the last."""
        with self._lock:
            reader = self._reader = Future()
            self._hand_over()
            return reader

    def _hand_over(self) -> None:
        reader = self._reader
        if reader is None or not (self._ready or self._has_ended):
            return
        self._reader = None
        if reader.set_running_or_notify_cancel():
            pieces, self._ready = self._ready or None, []
            reader.set_result(pieces)
