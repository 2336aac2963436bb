"""Work in steps, within a deadline, and off the event loop; and streams, whose steps yield pieces between their work.

One generator serves calls and coroutines: it yields pieces of work, and a driver of either kind does them. Late or
cancelled work is left behind and stopped.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, takewhile
from traceback import extract_tb
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, cast

from semgrad_guard.engine.interruption import SLICE, Stop, current_stop, start_thread, stopping
from semgrad_guard.errors import InputError, LowConfidenceError, SemGradGuardError

T = TypeVar("T")
P = TypeVar("P")
"""A piece of a stream: of the text, of the thought before it, or anything else that a frontend shows."""
R = TypeVar("R")


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
StreamSteps = Generator[Work | P, Any, R]
"""Steps that yield pieces between their work, and end with a value."""


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
        go_on = work = None  # an error that leaves takes this frame along, and these may hold it, or a draft


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
        go_on = work = None


# Streams.


class Iterated(Generic[P]):
    """Pieces from a generator, which is made with the first of them: one for calls, or one for coroutines."""

    def __init__(
        self, make: Callable[[], Iterator[P]] | None = None, amake: Callable[[], AsyncIterator[P]] | None = None
    ) -> None:
        self._make, self._amake = make, amake
        self._pieces: Any = None

    def next(self) -> Work:
        """The next piece; None behind the last."""

        def call() -> P | None:
            self._pieces = self._pieces or cast("Any", self._make)()
            return next(self._pieces, None)

        async def coroutine() -> P | None:
            self._pieces = self._pieces or cast("Any", self._amake)()
            return await anext(self._pieces, None)

        return Work(call, coroutine)

    def close(self) -> Work:
        """End the generator; harmless at any time."""

        def call() -> None:
            if (close := getattr(self._pieces, "close", None)) is not None:
                close()

        async def coroutine() -> None:
            if (close := getattr(self._pieces, "aclose", None)) is not None:
                await close()

        return Work(call, coroutine)


class Live(Iterated[P]):
    """An answer whose pieces come from a generator."""

    def draft(self) -> Work:
        """The whole answer with its score, once the pieces have ended."""
        raise NotImplementedError

    def steps(self) -> StreamSteps[P, Any]:
        """Its pieces, and then the draft."""
        try:
            while (piece := (yield self.next())) is not None:
                yield piece
            return (yield self.draft())
        finally:
            yield self.close()


def written(
    answer: StreamSteps[Any, R], stop: Stop, *, show: Callable[[Any], Iterable[P]] = lambda piece: (piece,)
) -> StreamSteps[P, R]:
    """The pieces of an answer as it is written, in the form that `show` gives them.

    A stream that is closed, or whose task is cancelled, stops the model.
    """
    with cancelling(stop):
        try:
            while True:
                with stopping(stop):  # not while the caller has a piece
                    piece = yield from _next(answer)
                if isinstance(piece, _Ended):
                    return cast("_Ended[R]", piece).value
                yield from show(piece)
        finally:
            yield from _end(answer)


def run_stream(steps: StreamSteps[P, Any]) -> Generator[P]:
    """The pieces of such steps, by calls."""
    try:
        while not isinstance(piece := drive(sealing(_next(steps))), _Ended):
            yield piece
    finally:
        drive(sealing(_end(steps)))


async def arun_stream(steps: StreamSteps[P, Any]) -> AsyncGenerator[P]:
    """As `run_stream`, on the event loop; closing it, or cancelling its task, stops the model."""
    try:
        while not isinstance(piece := await adrive(sealing(_next(steps))), _Ended):
            yield piece
    finally:
        await adrive(sealing(_end(steps)))


@dataclass(frozen=True)
class _Ended(Generic[R]):
    """What follows the last piece: the value of the steps."""

    value: R


class _Closed(asyncio.CancelledError):
    """The reader has left. (After a `GeneratorExit`, steps within steps could do no more work.)"""


def _next(steps: StreamSteps[P, R], error: BaseException | None = None) -> Steps[P | _Ended[R]]:
    """The work before the next piece, and that piece. With an `error` the steps continue with it."""
    go_on = partial(next, steps) if error is None else partial(steps.throw, error)
    try:
        while isinstance(step := go_on(), Work):
            try:
                go_on = partial(steps.send, (yield step))
            except BaseException as raised:  # noqa: BLE001 - the steps decide
                go_on = partial(steps.throw, raised)
        return step
    except StopIteration as end:
        return _Ended(end.value)
    finally:
        del error, go_on  # they may hold an error, which refers to this frame


def _end(steps: StreamSteps[Any, Any]) -> Steps[None]:
    """The work by which steps end, wherever they are."""
    with suppress(_Closed):
        yield from _next(steps, _Closed())


# Errors, deadlines, and work off the event loop.


@contextmanager
def cancelling(stop: Stop) -> Generator[None]:
    """While this lasts, leaving by a cancelled task or a closed generator stops the work."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        stop.cancel()
        raise


_OURS = ("semgrad_guard.", "langchain_semgrad_guard.", "llama_index_semgrad_guard.")
_FRONTS = ("semgrad_guard.guard.", "semgrad_guard.adapters.", *_OURS[1:])
E = TypeVar("E", bound=BaseException)


def sealed(error: E) -> E:
    """The error as it may leave a guard: without the frames whose local variables may hold a withheld answer.

    Reporters of errors write these variables down. A typed error of ours has no frames. Of another one, those stay of
    the code that a front calls (a target, say), up to where that calls ours again. What the model's thread raised has
    none: a note tells the place.
    """
    links = [] if isinstance(error, SemGradGuardError) else list(_links(error.__traceback__))
    behind = list(dropwhile(lambda link: _place(link).startswith(_FRONTS), links))
    kept = list(takewhile(lambda link: not _place(link).startswith(_OURS), behind))
    if len(kept) < len(behind) and not getattr(error, "__notes__", ()):
        raised = extract_tb(behind[-1])[0]
        error.add_note(f"raised in {raised.filename}, line {raised.lineno}, in {raised.name}")
    if kept:
        kept[-1].tb_next = None
    if isinstance(error, LowConfidenceError):
        error.__cause__ = error.__context__ = None
    for before in (error.__cause__, error.__context__):
        if before is not None:
            sealed(before)
    return error.with_traceback(kept[0] if kept else None)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _place(link: TracebackType) -> str:
    return f"{link.tb_frame.f_globals.get('__name__', '')}."


def sealing(steps: Steps[T]) -> Steps[T]:
    """The same steps, whose errors are sealed; a cancelled task's is one, too, and frameworks hand it to handlers."""
    try:
        return (yield from steps)
    except BaseException as error:  # noqa: BLE001 - raised below, where no frame holds a draft
        failed = sealed(error)
    raise failed


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
