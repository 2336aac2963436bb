"""The cost of work whose results are remembered and shared: each caller's cost is that of all work it needed.

A remembered result takes no time, and the first caller waits for the work of all. So each thread keeps a correction:
work served from memory adds the time that it once took, and work done for others takes their share off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class _Thread(threading.local):
    correction = 0.0  # milliseconds
    served: set[Hashable] | None = None  # None where no caller measures: then nothing is kept


_thread = _Thread()


def with_cost(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and its cost in milliseconds: its own time, and that of remembered work it used."""
    began, correction, served = time.perf_counter(), _thread.correction, _thread.served
    _thread.served = set()
    try:
        value = work()
    finally:
        _thread.served = served
    return value, (time.perf_counter() - began) * 1000 + _thread.correction - correction


def add_cost(milliseconds: float, *, once: Hashable | None = None) -> None:
    """Add the cost of remembered work to the work in progress; below zero: of work done for others.

    Work that uses the same result again pays for it once: `once` names the thing.
    """
    if _thread.served is None or once in _thread.served:
        return
    if once is not None:
        _thread.served.add(once)
    _thread.correction += milliseconds
