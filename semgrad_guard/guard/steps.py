"""One generator for calls and for coroutines: it yields pieces of work, and a driver of either kind does them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from semgrad_guard.errors import InputError
from semgrad_guard.guard.timing import ain_time, in_time, off_loop

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A piece of work in both forms. Without a coroutine the call runs off the event loop."""

    call: Callable[[], Any]
    coroutine: Callable[[], Awaitable[Any]] | None = None

    @classmethod
    def awaited(cls, coroutine: Callable[[], Awaitable[Any]]) -> Work:
        """Work of `adrive` alone."""
        return cls(_only_awaited, coroutine)

    @classmethod
    def of(cls, make: Callable[[], Steps[Any]]) -> Work:
        """The steps of a generator as one piece of work."""
        return cls(lambda: drive(make()), lambda: adrive(make()))

    def alone(self) -> Steps[Any]:
        """This work as the only step."""
        return (yield self)

    def begin(self) -> Awaitable[Any]:
        """The work under way, to be awaited."""
        return off_loop(self.call) if self.coroutine is None else self.coroutine()

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
    value, error = None, None
    try:
        while True:
            # Outside of the handler below: within it the error would become the context of what the steps raise.
            work = steps.send(value) if error is None else steps.throw(error)
            value, error = None, None
            try:
                value = work.call()
            except BaseException as raised:  # noqa: BLE001 - the steps decide
                error = raised
    except StopIteration as end:
        return end.value
    finally:
        del error  # it refers to this frame


async def adrive(steps: Steps[T]) -> T:
    """Like `drive`, on the event loop."""
    value, error = None, None
    try:
        while True:
            work = steps.send(value) if error is None else steps.throw(error)
            value, error = None, None
            try:
                value = await work.begin()
            except BaseException as raised:  # noqa: BLE001 - as above
                error = raised
    except StopIteration as end:
        return end.value
    finally:
        del error


def _only_awaited() -> NoReturn:
    raise InputError("this work is a coroutine; call the asynchronous method")
