"""Several runs, one generation: what LangChain asks for one by one is generated together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from semgrad_guard import Generation, GenerationOptions, Message

Conversation = tuple[Message, ...]
GenerateAll = Callable[[Sequence[Conversation], GenerationOptions], list[Generation]]

_open: ContextVar[PendingBatch | None] = ContextVar("semgrad_guard_batch", default=None)


class PendingBatch:
    """The conversations that one owner is about to be asked for, in order.

    The first that is really asked for (LangChain's cache may answer some) is generated together with those behind it,
    `size` at a time; the others find their answers waiting. Where a batch fails, each is generated alone, so that an
    error ends the run it belongs to.
    """

    def __init__(self, owner: object, conversations: Sequence[Conversation], generate: GenerateAll, size: int) -> None:
        self._owner, self._generate, self._size = owner, generate, size
        self._waiting = list(conversations)
        self._done: list[tuple[Conversation, GenerationOptions, Generation]] = []
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Generator[None]:
        """The time of the runs, in this context and the threads and tasks that copy it."""
        token = _open.set(self)
        try:
            yield
        finally:
            _open.reset(token)

    @staticmethod
    def take(owner: object, conversation: Conversation, options: GenerationOptions) -> Generation | None:
        """The answer to one of the owner's announced conversations; None if it must be generated alone."""
        batch = _open.get()
        return batch._take(conversation, options) if batch is not None and batch._owner is owner else None

    def _take(self, conversation: Conversation, options: GenerationOptions) -> Generation | None:
        with self._lock:
            found = self._find(conversation, options)
            if found is None and conversation in self._waiting:
                self._fill(self._waiting.index(conversation), options)
                found = self._find(conversation, options)
            return found

    def _find(self, conversation: Conversation, options: GenerationOptions) -> Generation | None:
        for index, (known, used, generation) in enumerate(self._done):
            if known == conversation and used == options:
                del self._done[index]
                return generation
        return None

    def _fill(self, first: int, options: GenerationOptions) -> None:
        """Generate the next `size` conversations from `first` on; those before it were answered by a cache."""
        group, self._waiting = self._waiting[first : first + self._size], self._waiting[first + self._size :]
        try:
            generations = self._generate(group, options)
        except Exception:  # noqa: BLE001 - whoever caused it meets it again alone, in a run of its own
            return
        self._done += [(each, options, generation) for each, generation in zip(group, generations, strict=True)]
