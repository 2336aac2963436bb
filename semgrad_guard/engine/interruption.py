"""When a model must stop: deadlines and cancellations, checked wherever it works.

A `Stop` is made where a call begins and set for the calls below with `stopping`; a context variable carries it down, so
that no function needs a parameter for it. Code that runs a model calls `current_stop().check()` between two pieces of
work: at each decoder layer, between blocks of the vocabulary, while it waits for a lock. `check` raises; holders of
resources release them in the usual way, and no result is changed. A new thread begins without the stops of its maker:
see `start_thread`.

Where the process ends, the work of all threads that may run a model is stopped, and the process waits for them. A
thread that comes back from torch into an interpreter that is gone aborts the whole process ("terminate called without
an active exception"). Python waits for ordinary threads, and would wait for the end of a long answer; it does not wait
for daemon threads. So these are daemon threads under a stop of their own: the process cancels all of them, and waits
until each has reached its next check.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

from semgrad_guard.errors import AnswerCancelledError, DeadlineExceededError, InputError

SLICE = 0.02
"""Seconds between two checks of a thread that waits under a stop."""
_PATIENCE = 5.0
"""Seconds that the end of the process waits for threads that may have left the model for something else."""


class Stop:
    """A time to stop: `timeout` seconds from now (None: never), or as soon as it is cancelled. Thread-safe.

    Raises:
        InputError: the timeout is not above 0.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise InputError(f"a timeout is a number of seconds above 0, or None for no limit, and not {timeout}")
        self.timeout, self._began = timeout, time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._cancelled = False

    @property
    def overdue(self) -> DeadlineExceededError:
        """The error when the time is over."""
        return DeadlineExceededError(
            f"the answer was not complete within the {self.timeout:g} s that were allowed for it. Raise `timeout`, "
            "or ask for less: a smaller `max_tokens`, a shorter prompt, fewer samples"
        )

    def cancel(self) -> None:
        """Stop the work at its next check. Harmless at any time, from any thread."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float | None:
        """Seconds that are left, 0 or more; None where there is no limit."""
        if self._cancelled:
            return 0.0
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Return if work may continue.

        Raises:
            AnswerCancelledError: it was cancelled.
            DeadlineExceededError: the time is over.
        """
        if self._cancelled:
            raise AnswerCancelledError("the call was cancelled before its answer was complete; nothing is delivered")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self.overdue


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

    @property
    def overdue(self) -> DeadlineExceededError:
        """The error of the earliest deadline; there must be one."""
        return min(
            (stop for stop in self.stops if stop.timeout is not None), key=lambda stop: stop.remaining or 0
        ).overdue

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

    _all: ClassVar[WeakSet[InterruptibleLock]] = WeakSet()
    _all_lock: ClassVar[threading.Lock] = threading.Lock()
    _last_thread: ClassVar[threading.Thread | None] = None
    """The thread that ends the process; no other one runs a model any more."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder: threading.Thread | None = None
        self.turn = 0
        with self._all_lock:
            self._all.add(self)

    @classmethod
    def keep_all(cls) -> None:
        """Take all locks for good, each at the end of the turn that it is in: only this thread runs a model now."""
        cls._last_thread = threading.current_thread()
        with cls._all_lock:
            locks = list(cls._all)
        for lock in locks:
            while not lock._lock.acquire(timeout=SLICE):
                if lock._holder is not None and not lock._holder.is_alive():
                    break  # it ended within its turn, and the lock stays taken

    @classmethod
    def renew_all(cls) -> None:
        """After a fork: the only thread of this process has the locks that it held before, and the others are free."""
        cls._all_lock = threading.Lock()
        for lock in list(cls._all):
            if lock._holder is not threading.current_thread():
                lock._lock, lock._holder, lock._depth = threading.RLock(), None, 0

    @property
    def is_mine(self) -> bool:
        """Whether the running thread holds it."""
        return self._holder is threading.current_thread()

    def __enter__(self) -> None:
        if stop := current_stop():
            stop.check()
            while not self._lock.acquire(timeout=SLICE):
                self._halt_at_the_end_of_the_process()
                stop.check()
        else:
            self._lock.acquire()
        self._depth += 1
        self._holder = threading.current_thread()
        self.turn += self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        leaves = not self._depth
        if leaves:
            self._holder = None
        self._lock.release()
        if leaves:
            self._halt_at_the_end_of_the_process()

    @classmethod
    def _halt_at_the_end_of_the_process(cls) -> None:
        """Never return to a daemon thread of an interpreter that is about to go.

        Python ends such a thread where it next needs the interpreter, by unwinding its stack. If that happens in torch,
        C++ aborts the process.
        """
        if cls._last_thread not in (None, threading.current_thread()):
            threading.Event().wait()


@dataclass(frozen=True)
class _Running:
    """A thread for the end of the process. Nothing here may hold the thread's work, nor a model."""

    stop: Stop
    only_runs_the_model: bool


_running: WeakKeyDictionary[threading.Thread, _Running] = WeakKeyDictionary()
_running_lock = threading.Lock()
_ending = threading.Event()


def start_thread(
    work: Callable[[], object],
    *,
    name: str,
    stop: Stop | None = None,
    context: Context | None = None,
    only_runs_the_model: bool = False,
) -> threading.Thread:
    """Begin work that may run a model, in a daemon thread.

    Args:
        work: heeds the current stop.
        name: the thread's name.
        stop: counts for the work, and is cancelled where the process ends; by default one of its own.
        context: the context variables of the work; by default none are set.
        only_runs_the_model: the work never waits for anything that its stop does not end. The process then waits for it
            as long as it takes. Other work may wait for a server; the process waits as long as it runs a model, else
            for some seconds.
    """
    stop = Stop() if stop is None else stop

    def run() -> None:
        with stopping(stop):
            work()

    thread = threading.Thread(target=(context or Context()).run, args=(run,), daemon=True, name=name)
    with _running_lock:
        _running[thread] = _Running(stop, only_runs_the_model)
    if _ending.is_set():
        stop.cancel()
    thread.start()
    return thread


def _end() -> None:
    """Stop the work of all threads, wait for them, and let no thread begin to run a model any more."""
    _ending.set()
    with _running_lock:
        threads = dict(_running)
    for known in threads.values():
        known.stop.cancel()
    until = time.monotonic() + _PATIENCE
    for thread, known in threads.items():
        if thread.ident is not None:
            thread.join(None if known.only_runs_the_model else max(0.0, until - time.monotonic()))
    InterruptibleLock.keep_all()


def _forget() -> None:
    """After a fork: the threads are the parent's, and so are the locks that they hold."""
    global _running_lock
    _running_lock = threading.Lock()
    _running.clear()
    InterruptibleLock.renew_all()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
