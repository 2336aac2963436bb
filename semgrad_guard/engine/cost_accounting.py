"""What work costs where results are remembered and shared: everyone's cost is that of all they needed.

A remembered result takes no time, and whoever asks first waits for everybody's. So each thread keeps a correction: who
is served from memory has the time added that the work took when it was done, and who did it for others has their share
taken off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class _Thread(threading.local):
    correction = 0.0  # milliseconds
    served: set[Hashable] | None = None  # None where nobody asks what the work costs: then nothing is kept


_thread = _Thread()


def with_cost(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its cost in milliseconds: its own time, and that of remembered work it was served."""
    began, correction, served = time.perf_counter(), _thread.correction, _thread.served
    _thread.served = set()
    try:
        value = work()
    finally:
        _thread.served = served
    return value, (time.perf_counter() - began) * 1000 + _thread.correction - correction


def add_cost(milliseconds: float, *, once: Hashable | None = None) -> None:
    """Add to the cost of the work in progress what it is served from memory; below zero: what it did for others.

    Work that asks for the same thing again pays for it once: `once` names the thing.
    """
    if _thread.served is None or once in _thread.served:
        return
    if once is not None:
        _thread.served.add(once)
    _thread.correction += milliseconds
