"""Batches: the runs of one batch wait for each other, so that one generation answers all and a target is called once.

LangChain opens a run, calls the model and closes the run; the runs of a batch do not know of each other. Here each run
takes a `Seat`, puts its call there and waits (`gathered`). Only one of them moves at a time, so that handlers hear them
one after the other. Of the calls, a local model generates those together that LangChain's cache does not answer
(`PendingBatch`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from langchain_core.outputs import ChatResult

from langchain_semgrad_guard.answers import Call, Result
from semgrad_guard import Generation, GenerationOptions, Message
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.guard import Stop, in_thread

R = TypeVar("R")


class Seat:
    """The place of one run in its batch: the call that it makes, and the result that it waits for."""

    def __init__(self, owner: object) -> None:
        self.owner, self._lock, self._is_free = owner, threading.Lock(), True
        self.call: Future[Call | None] = Future()
        self.result: Future[ChatResult] = Future()

    def taken(self) -> Seat | None:
        """This seat, once; None where it has been taken, or where its run is over."""
        with self._lock:
            free, self._is_free = self._is_free, False
        return self if free else None

    def ask(self, call: Call) -> ChatResult:
        """Wait for the result of a call."""
        self.call.set_result(call)
        return self.result.result()

    async def aask(self, call: Call) -> ChatResult:
        """Like `ask`, for a task."""
        self.call.set_result(call)
        return await asyncio.wrap_future(self.result)

    def is_over(self) -> None:
        """Let calls that the run has left behind be made alone."""
        self.taken()
        if not self.call.done():
            self.call.set_result(None)

    def give(self, result: Result | BaseException) -> None:
        """Let the run continue with its result, or with an error; a cancelled task does not wait for either."""
        if self.result.cancelled():
            return
        if isinstance(result, BaseException):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


_seat: ContextVar[Seat | None] = ContextVar("semgrad_guard_seat", default=None)


def take_seat(owner: object) -> Seat | None:
    """The seat of the run in progress, once; None if the run is alone, or another model's."""
    seat = _seat.get()
    return seat.taken() if seat is not None and seat.owner is owner else None


def gathered(
    owner: object, runs: Sequence[Callable[[], R]], answer: Callable[[Sequence[Call]], Sequence[Result]]
) -> list[R]:
    """The results of runs in threads; `answer` is called in this thread, with the calls of all of them."""
    seats = [Seat(owner) for _ in runs]
    ends: list[Future[R]] = [Future() for _ in runs]

    def work(seat: Seat, end: Future[R], run: Callable[[], R]) -> None:
        _seat.set(seat)
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            seat.is_over()
            end.set_exception(error)
        else:
            seat.is_over()
            end.set_result(result)

    stop = Stop()
    try:
        for seat, end, run in zip(seats, ends, runs, strict=True):
            in_thread(partial(work, seat, end, run), stop=stop)
            seat.call.result()
    except BaseException as error:  # Ctrl-C: the run that moves stops, and those that wait fail
        stop.cancel()
        for seat in seats:
            seat.give(error)
        raise
    waiting = [(seat, end, call) for seat, end in zip(seats, ends, strict=True) if (call := seat.call.result())]
    results: Sequence[Result | BaseException] = ()
    try:
        results = answer([call for _, _, call in waiting]) if waiting else ()
    except BaseException as error:
        results = [error] * len(waiting)
        raise
    finally:
        for (seat, end, _), result in zip(waiting, results, strict=True):
            seat.give(result)
            wait([end])
    return [end.result() for end in ends]


async def agathered(
    owner: object,
    runs: Sequence[Callable[[], Awaitable[R]]],
    answer: Callable[[Sequence[Call]], Awaitable[Sequence[Result]]],
) -> list[R]:
    """Like `gathered`, with tasks of the event loop; cancelling it cancels them."""
    seats = [Seat(owner) for _ in runs]
    tasks: list[asyncio.Task[R]] = []

    async def work(seat: Seat, run: Callable[[], Awaitable[R]]) -> R:
        _seat.set(seat)
        try:
            return await run()
        finally:
            seat.is_over()

    try:
        for seat, run in zip(seats, runs, strict=True):
            tasks.append(asyncio.create_task(work(seat, run)))
            await asyncio.wrap_future(seat.call)
        waiting = [(seat, task, call) for seat, task in zip(seats, tasks, strict=True) if (call := seat.call.result())]
        results = await answer([call for _, _, call in waiting]) if waiting else ()
        for (seat, task, _), result in zip(waiting, results, strict=True):
            seat.give(result)
            await asyncio.wait([task])
        return list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


@dataclass(frozen=True)
class Request:
    """Everything that an answer of a local model and its record depend on."""

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm
    logprobs: bool = False


GenerateAll = Callable[[Sequence[Request]], list[Generation]]
"""Answers requests with the same options and form."""

_pending: ContextVar[PendingBatch | None] = ContextVar("semgrad_guard_batch", default=None)


class PendingBatch:
    """The requests that one owner is about to get, in order.

    The first request that is really made (LangChain's cache may answer some) is generated together with those after
    it, `size` at a time; these find their answers ready. Where a batch fails, each request is generated alone, so that
    an error ends the run it belongs to.
    """

    def __init__(self, owner: object, requests: Sequence[Request], generate: GenerateAll, size: int) -> None:
        self._owner, self._generate, self._size = owner, generate, size
        self._waiting = list(requests)
        self._ready: list[tuple[Request, Generation]] = []
        self._lock, self._is_over = threading.Lock(), False

    @contextmanager
    def opened(self) -> Generator[None]:
        """The time of the runs, in this context and the threads and tasks that copy it."""
        token = _pending.set(self)
        try:
            yield
        finally:
            self._is_over = True
            _pending.reset(token)

    @staticmethod
    def take(owner: object, request: Request) -> Generation | None:
        """The answer to one of the owner's announced requests; None if it must be generated alone."""
        batch = _pending.get()
        if batch is None or batch._owner is not owner or batch._is_over:
            return None
        with batch._lock:
            if request in batch._waiting and all(request != known for known, _ in batch._ready):
                batch._fill(batch._waiting.index(request))
            for index, (known, generation) in enumerate(batch._ready):
                if known == request:
                    del batch._ready[index]
                    return generation
        return None

    def _fill(self, first: int) -> None:
        """Generate the next `size` requests from `first` on; those before it were answered by a cache."""
        waiting = self._waiting[first:]
        kind = (waiting[0].options, waiting[0].form)
        alike = [request for request in waiting if (request.options, request.form) == kind]
        batch = alike[: self._size]
        self._waiting = [request for request in waiting if not any(request is taken for taken in batch)]
        try:
            generations = self._generate(batch)
        except Exception:  # noqa: BLE001 - each is generated alone, and the error raised in its own run
            return
        self._ready += list(zip(batch, generations, strict=True))
