"""Work in steps, within a deadline, and off the event loop.

One generator serves calls and coroutines: it yields pieces of work, and a driver of either kind does them. Late or
cancelled work is left behind and stopped.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from semgrad_guard.engine.interruption import SLICE, Stop, current_stop, start_thread, stopping
from semgrad_guard.errors import InputError, LowConfidenceError, SemGradGuardError

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A piece of work in both forms. Without a coroutine the call runs off the event loop."""

    call: Callable[[], Any]
    coroutine: Callable[[], Awaitable[Any]] | None = None

    @classmethod
    def awaited(cls, coroutine: Callable[[], Awaitable[Any]]) -> Work:
        """Work of `adrive` alone."""

        def call() -> NoReturn:
            raise InputError("this work is a coroutine; call the asynchronous method")

        return cls(call, coroutine)

    @classmethod
    def of(cls, make: Callable[[], Steps[Any]]) -> Work:
        """The steps of a generator as one piece of work."""
        return cls(lambda: drive(make()), lambda: adrive(make()))

    @classmethod
    def calling(cls, target: Callable[[Any], Any], question: Any, *, instead: str) -> Work:
        """A call of the user's target, which may be asynchronous where this work is awaited: by `instead`, a method."""

        def call() -> Any:
            answer = target(question)
            if inspect.isawaitable(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise InputError(f"the escalation target is asynchronous; use {instead}")
            return answer

        async def coroutine() -> Any:
            if inspect.iscoroutinefunction(target):
                return await target(question)
            answer = await off_loop(partial(target, question))
            return await answer if inspect.isawaitable(answer) else answer

        return cls(call, coroutine)

    @classmethod
    def at_once(cls, call: Callable[[], Any]) -> Work:
        """A call that waits for nothing, in both forms."""

        async def coroutine() -> Any:
            return call()

        return cls(call, coroutine)

    def begin(self) -> Awaitable[Any]:
        """The work under way, to be awaited."""
        return off_loop(self.call) if self.coroutine is None else self.coroutine()

    def replacing(self, replace: Callable[[Exception], Any]) -> Work:
        """The same work. An error of it ends here, and `replace` makes the result of it, or the error in its place."""

        def steps() -> Steps[Any]:
            try:
                return (yield self)
            except Exception as error:  # noqa: BLE001 - `replace` decides
                found = replace(error)
            if isinstance(found, Exception):
                raise found  # here, where the first error is no context of another
            return found

        return Work.of(steps)

    def in_time(self) -> Work:
        """The same work, which ends with a `DeadlineExceededError` where it is late."""
        return Work(lambda: in_time(self.call), lambda: ain_time(self.begin()))


Steps = Generator[Work, Any, T]
"""Steps that end with a value."""


def drive(steps: Steps[T]) -> T:
    """The value of these steps, their work done by calls.

    Raises:
        Exception: whatever a piece of work raises, where the steps do not handle it.
    """
    go_on = partial(next, steps)
    try:
        while True:
            work = go_on()  # not in the handler below: there its error would become the context of what the steps raise
            try:
                go_on = partial(steps.send, work.call())
            except BaseException as error:  # noqa: BLE001 - the steps decide
                go_on = partial(steps.throw, error)
    except StopIteration as end:
        return end.value
    finally:
        del go_on  # it may hold an error, which refers to this frame


async def adrive(steps: Steps[T]) -> T:
    """Like `drive`, on the event loop."""
    go_on = partial(next, steps)
    try:
        while True:
            work = go_on()
            try:
                go_on = partial(steps.send, await work.begin())
            except BaseException as error:  # noqa: BLE001 - as above
                go_on = partial(steps.throw, error)
    except StopIteration as end:
        return end.value
    finally:
        del go_on


@contextmanager
def cancelling(stop: Stop) -> Generator[None]:
    """While this lasts, leaving by a cancelled task or a closed generator stops the work."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        stop.cancel()
        raise


_HOLD_DRAFTS = ("semgrad_guard.guard", "langchain_semgrad_guard", "llama_index_semgrad_guard")
E = TypeVar("E", bound=Exception)


def sealed(error: E) -> E:
    """The error as it may leave a guard: without the frames whose local variables may hold a withheld answer.

    Reporters of errors write these variables down. A typed error of ours has no frames; of another one, the
    frames of its own code stay.
    """
    frames = None if isinstance(error, SemGradGuardError) else error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_HOLD_DRAFTS):
        frames = frames.tb_next
    if isinstance(error, LowConfidenceError):
        error.__cause__ = error.__context__ = None
    return error.with_traceback(frames)


def in_time(work: Callable[[], T]) -> T:
    """The result of `work`, if it ends before the current deadline; work that may be late runs in a thread.

    Raises:
        DeadlineExceededError: it is late; it is stopped, and left behind.
    """
    stop = current_stop()
    if stop.remaining is None:
        return work()
    future = _future_of(work)
    try:
        return future.result(stop.remaining)
    except FutureTimeoutError:
        if future.done():
            raise  # the work's own
        stop.check()
        raise


async def ain_time(work: Awaitable[T]) -> T:
    """Like `in_time`, for an awaitable.

    Raises:
        DeadlineExceededError: it is late; it is cancelled.
    """
    stop = current_stop()
    if stop.remaining is None:
        return await work
    limit = asyncio.timeout(stop.remaining + SLICE)  # the loop's clock may be a little ahead
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():  # work off the loop has been cancelled by now; the deadline has ended it
            stop.check()
        raise


async def awaited_all(submit: Callable[[], Sequence[Future[T]]]) -> list[T]:
    """The results of the requests that `submit` makes; where one fails, the others are cancelled.

    It waits in no thread, and a cancelled task cancels them.

    Raises:
        DeadlineExceededError: it is late; they are cancelled.
    """

    async def results() -> list[T]:
        futures = [asyncio.wrap_future(future) for future in await read_off_loop(submit)]
        try:
            return await asyncio.gather(*futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    return await ain_time(results())


async def read_off_loop(read: Callable[[], T], *, readers: Executor | None = None) -> T:
    """The result of work that waits for nothing, such as reading a prompt: in a thread of these, or of the loop's."""
    stop = Stop()

    def work() -> T:
        current_stop().check()
        return read()

    with stopping(stop), cancelling(stop):
        return await asyncio.get_running_loop().run_in_executor(readers, copy_context().run, work)


async def off_loop(work: Callable[[], T]) -> T:
    """The result of `work`, from a thread of its own; a task that is cancelled meanwhile stops the work."""
    stop = Stop()
    with stopping(stop), cancelling(stop):
        return await asyncio.wrap_future(_future_of(work))


def _future_of(work: Callable[[], T]) -> Future[T]:
    """The future of work in a thread that does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a future that cannot be cancelled takes its result at any time

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            future.set_exception(error)

    start_thread(run, name="semgrad-guard-work", context=copy_context())
    return future
