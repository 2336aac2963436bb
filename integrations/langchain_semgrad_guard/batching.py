"""Several runs, one generation: what LangChain asks for one by one is generated together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from semgrad_guard import Generation, GenerationOptions, Message
from semgrad_guard.adapters.answer_form import AnswerForm


@dataclass(frozen=True)
class Request:
    """Everything that one answer and its record depend on."""

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm
    logprobs: bool = False

    def goes_with(self, other: Request) -> bool:
        """Whether one generation can answer both."""
        return self.options == other.options and self.form == other.form


GenerateAll = Callable[[Sequence[Request]], list[Generation]]
"""Answers requests that go with each other."""

_open: ContextVar[PendingBatch | None] = ContextVar("semgrad_guard_batch", default=None)


class PendingBatch:
    """What one owner is about to be asked for, in order.

    The first request that is really made (LangChain's cache may answer some) is generated together with those behind
    it, `size` at a time; the others find their answers waiting. Where a batch fails, each is generated alone, so that
    an error ends the run it belongs to.
    """

    def __init__(self, owner: object, requests: Sequence[Request], generate: GenerateAll, size: int) -> None:
        self._owner, self._generate, self._size = owner, generate, size
        self._waiting = list(requests)
        self._done: list[tuple[Request, Generation]] = []
        self._lock, self._is_over = threading.Lock(), False

    @contextmanager
    def opened(self) -> Generator[None]:
        """The time of the runs, in this context and the threads and tasks that copy it."""
        token = _open.set(self)
        try:
            yield
        finally:
            self._is_over = True
            _open.reset(token)

    @staticmethod
    def take(owner: object, request: Request) -> Generation | None:
        """The answer to one of the owner's announced requests; None if it must be generated alone."""
        batch = _open.get()
        found = batch is not None and batch._owner is owner and not batch._is_over
        return batch._take(request) if batch is not None and found else None

    def _take(self, request: Request) -> Generation | None:
        with self._lock:
            found = self._find(request)
            if found is None and request in self._waiting:
                self._fill(self._waiting.index(request))
                found = self._find(request)
            return found

    def _find(self, request: Request) -> Generation | None:
        for index, (known, generation) in enumerate(self._done):
            if known == request:
                del self._done[index]
                return generation
        return None

    def _fill(self, first: int) -> None:
        """Generate the next `size` requests from `first` on; those before it were answered by a cache."""
        waiting = self._waiting[first:]
        group = [request for request in waiting if request.goes_with(waiting[0])][: self._size]
        self._waiting = [request for request in waiting if not any(request is each for each in group)]
        try:
            generations = self._generate(group)
        except Exception:  # noqa: BLE001 - whoever caused it meets it again alone, in a run of its own
            return
        self._done += list(zip(group, generations, strict=True))
