"""Threads that may run a model. Where the process ends, their work is stopped, and the process waits for them.

A thread that comes back from torch into an interpreter that is gone aborts the whole process ("terminate called without
an active exception"). Python waits for ordinary threads, and would wait for the end of a long answer; it does not wait
for daemon threads. So these are daemon threads under a stop of their own: the process cancels all of them, and waits
until each has reached its next check.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from semgrad_guard.engine.interruption import InterruptibleLock, Stop, stopping

_PATIENCE = 5.0
"""Seconds that the end of the process waits for threads that may have left the model for something else."""


@dataclass(frozen=True)
class _Known:
    """A thread for the end of the process. Nothing here may hold the thread's work, nor a model."""

    stop: Stop
    only_runs_the_model: bool


_threads: WeakKeyDictionary[threading.Thread, _Known] = WeakKeyDictionary()
_lock = threading.Lock()
_ending = threading.Event()


def start(
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
    with _lock:
        _threads[thread] = _Known(stop, only_runs_the_model)
    if _ending.is_set():
        stop.cancel()
    thread.start()
    return thread


def _end() -> None:
    """Stop the work of all threads, wait for them, and let no thread begin to run a model any more."""
    _ending.set()
    with _lock:
        threads = dict(_threads)
    for known in threads.values():
        known.stop.cancel()
    until = time.monotonic() + _PATIENCE
    for thread, known in threads.items():
        if thread.ident is not None:
            thread.join(None if known.only_runs_the_model else max(0.0, until - time.monotonic()))
    InterruptibleLock.keep_all()


def _forget() -> None:
    """After a fork: the threads are the parent's, and so are the locks that they hold."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    InterruptibleLock.renew_all()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
