"""What work costs where results are remembered and shared: everyone pays in full for what they needed.

A remembered result comes for nothing on the clock, and the one who happened to ask first waited for everybody. Both are
put right by a credit, kept per thread: who is served from memory is charged what the work took when it was done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class _Thread(threading.local):
    credit = 0.0
    served: frozenset[Hashable] = frozenset()


_thread = _Thread()


def priced(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its price in milliseconds: its own time, and that of remembered work it was served."""
    began, credit, served = time.perf_counter(), _thread.credit, _thread.served
    _thread.served = frozenset()
    try:
        value = work()
    finally:
        _thread.served = served
    return value, (time.perf_counter() - began) * 1000 + _thread.credit - credit


def charge(milliseconds: float, *, once: Hashable | None = None) -> None:
    """Charge work in progress for what it is served from memory; below zero: for what it did for others.

    Work that asks for the same thing again pays for it once: `once` names the thing.
    """
    if once is not None:
        if once in _thread.served:
            return
        _thread.served |= {once}
    _thread.credit += milliseconds
