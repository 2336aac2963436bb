"""A model's steps, counted and held: the claims of a test about them do not depend on how fast the machine is."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from semgrad_guard import LanguageModel
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.scores.exactness import checked

LIMIT = 120.0
"""Seconds after which whatever a test waits for will not come, on the busiest machine."""


def until(found: Callable[[], object]) -> None:
    """Wait, in the running thread, until something is so."""
    end = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def until_stopped() -> None:
    """Wait, in the thread that runs the model, until its work was cancelled, or is out of time."""
    until(lambda: current_stop().remaining == 0)


class Steps:
    """Counts a model's forward passes but for its self-check's; at the beginning of one, something is done once."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.count, self.reached = 0, threading.Event()
        self._at, self._do = 0, lambda: None
        self._handle: Any = model._model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def at(self, count: int, do: Callable[[], Any]) -> None:
        """At the pass of this number, counted from 1, do this in the model's thread."""
        self._at, self._do = count, do

    def _seen(self, *_: Any) -> None:
        if any(frame.f_code is checked.__code__ for frame, _ in traceback.walk_stack(None)):
            return
        self.count += 1
        if self.count == self._at:
            self.reached.set()
            self._do()

    def in_all(self) -> int:
        """How many there were by the time that the model is free. Counts no more."""
        with self._model.turn:
            self._handle.remove()
            return self.count


async def most_threads(model: LanguageModel, call: Callable[[str], Awaitable[Any]], count: int) -> int:
    """How many more threads there are while so many calls wait for their model."""
    free, threads = threading.Event(), threading.active_count()
    model.worker.run(free.wait)
    calls = [asyncio.ensure_future(call(f"Where is number {number}?")) for number in range(count)]
    while model.worker.depth < count:
        await asyncio.sleep(0.01)
    most = threading.active_count() - threads
    free.set()
    await asyncio.gather(*calls)
    return most
