"""Runs of one batch that meet: each opens for itself, all are answered together, and each closes for itself.

LangChain opens a run, asks for its answer and closes it; runs of a batch know nothing of each other. Here the runs wait
for each other at the point where they ask, so that one generation answers all and a target is asked once. Only one of
them moves at a time, so handlers hear them one after the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar, cast

from semgrad_guard.guard import Stop, in_thread

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")

_seat: ContextVar[Any] = ContextVar("semgrad_guard_seat", default=None)


def take_seat(owner: object) -> Any:
    """The place of the run in progress in its batch, once; None if it is alone, or another model's."""
    seat = _seat.get()
    return seat.taken() if seat is not None and seat.owner is owner else None


class _Seat(Generic[Q, A]):
    """One run's place: what it asks, and the answer or the error it is given."""

    def __init__(self, owner: object) -> None:
        self.owner, self.is_taken, self._lock = owner, False, threading.Lock()
        self.question: Q | None = None
        self.answer: A | BaseException | None = None

    def taken(self) -> _Seat[Q, A] | None:
        """This place, once; None where it has been taken, or where its run is over."""
        with self._lock:
            free, self.is_taken = not self.is_taken, True
        return self if free else None

    def _given(self) -> A:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return cast("A", self.answer)


class Seat(_Seat[Q, A]):
    """A place in a batch of threads."""

    def __init__(self, owner: object) -> None:
        super().__init__(owner)
        self.waits, self.goes_on, self.ended = threading.Event(), threading.Event(), threading.Event()

    def ask(self, question: Q) -> A:
        """Wait for the answer to a question."""
        self.question = question
        self.waits.set()
        self.goes_on.wait()
        return self._given()

    def refuse(self, error: BaseException) -> None:
        """Let the run end with an error, whenever it asks."""
        self.answer = error
        self.goes_on.set()

    def give(self, answer: A | BaseException) -> None:
        """Let the run go on with its answer, to its end."""
        self.answer = answer
        self.goes_on.set()
        self.ended.wait()


class AsyncSeat(_Seat[Q, A]):
    """A place in a batch of tasks."""

    def __init__(self, owner: object) -> None:
        super().__init__(owner)
        self.waits, self.goes_on = asyncio.Event(), asyncio.Event()

    async def ask(self, question: Q) -> A:
        """Wait for the answer to a question."""
        self.question = question
        self.waits.set()
        await self.goes_on.wait()
        return self._given()


def gathered(
    owner: object, runs: Sequence[Callable[[], R]], answer: Callable[[Sequence[Q]], Sequence[A | BaseException]]
) -> list[R]:
    """What the runs return; `answer` is called in this thread, with what all of them ask."""
    ends: dict[int, Any] = {}
    seats = [Seat[Q, A](owner) for _ in runs]

    def work(index: int, run: Callable[[], R]) -> None:
        _seat.set(seats[index])
        try:
            ends[index] = run()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            ends[index] = _Raised(error)
        finally:
            seats[index].taken()  # whatever the run has left behind asks by itself
            seats[index].ended.set()
            seats[index].waits.set()

    stop = Stop()
    try:
        for index, run in enumerate(runs):
            in_thread(partial(work, index, run), stop=stop)
            seats[index].waits.wait()
    except BaseException as error:  # Ctrl-C: the run that moves stops, and nobody asks for those that wait
        stop.cancel()
        for seat in seats:
            seat.refuse(error)
        raise
    asking = [seat for seat in seats if seat.question is not None]
    answers: Sequence[A | BaseException] = ()
    try:
        answers = answer([cast("Q", seat.question) for seat in asking]) if asking else ()
    except BaseException as error:
        answers = [error] * len(asking)
        raise
    finally:
        for seat, each in zip(asking, answers, strict=True):
            seat.give(each)
    for end in ends.values():
        if isinstance(end, _Raised):
            raise end.error
    return [ends[index] for index in range(len(runs))]


class _Raised:
    """What a run raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def agathered(
    owner: object,
    runs: Sequence[Callable[[], Awaitable[R]]],
    answer: Callable[[Sequence[Q]], Awaitable[Sequence[A | BaseException]]],
) -> list[R]:
    """Like `gathered`, with tasks of the event loop; cancelling it cancels them."""
    seats = [AsyncSeat[Q, A](owner) for _ in runs]
    tasks: list[asyncio.Task[R]] = []

    async def work(seat: AsyncSeat[Q, A], run: Callable[[], Awaitable[R]]) -> R:
        _seat.set(seat)
        try:
            return await run()
        finally:
            seat.taken()
            seat.waits.set()

    try:
        for seat, run in zip(seats, runs, strict=True):
            tasks.append(asyncio.create_task(work(seat, run)))
            await seat.waits.wait()
        asking = [(seat, task) for seat, task in zip(seats, tasks, strict=True) if seat.question is not None]
        answers = await answer([cast("Q", seat.question) for seat, _ in asking]) if asking else ()
        for (seat, task), each in zip(asking, answers, strict=True):
            seat.answer = each
            seat.goes_on.set()
            await asyncio.wait([task])
        return list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
