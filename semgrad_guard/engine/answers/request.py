"""Requests to a model, the tickets for their results, and the pieces of an answer as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Generic, TypeVar

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.answers.sentence_evidence import EndedSentences
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import SLICE, Stop, Stops, current_stop, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import SemGradGuardError

P = TypeVar("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(Generic[R]):
    """Answers to one prompt, one for each of the `options`; their objective is that of later scoring.

    `finish` makes the result of the generations. It runs in the model's thread and within the model's turn, so that a
    score and the model's identity are of one state: the worker knows neither estimators nor drafts. `on_piece` is
    called in the model's thread with the pieces of the first answer and of its thought, and must not wait. Samples of
    the plans in `draws`, which `finish` reads off the evidence, are drawn in the meantime where the answers can be
    joined by others.

    `on_sentences`, in the place of `on_piece`, gets the sentences of the one answer as they end, in the model's thread
    and turn; the answer ends behind the last of them where it returns False. Where answers are written in whole runs it
    is not called.
    """

    prompt: Prompt
    options: tuple[GenerationOptions, ...]
    finish: Callable[[list[Generation]], R]
    objective: Objective = field(default_factory=Objective)
    on_piece: Callable[[Piece], None] | None = None
    on_sentences: Callable[[EndedSentences], bool] | None = None
    draws: tuple[Sampling, ...] = ()

    def then(self, make: Callable[[R], S]) -> Request[S]:
        """The same request with another result, made of its own in the model's thread."""
        other: Any = replace(self, finish=lambda written: make(self.finish(written)))
        return other


class Ticket(Future[R]):
    """The future of a request, or of other work for a model's thread, made in the context and under the stops of now.

    Cancelling it withdraws the request from the queue, or ends it at the next step. So `asyncio.wrap_future` passes on
    the cancellation of a task by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop()
        with stopping(self.stop):
            self.context, self.stops = copy_context(), current_stop()

    def cancel(self) -> bool:
        """As `Future.cancel`; a request that is being written gets an `AnswerCancelledError` soon."""
        self.stop.cancel()
        return super().cancel()

    def outcome(self) -> R:
        """The result, waited for under the current stops. A caller that leaves early cancels the request.

        Raises:
            AnswerInterruptedError: a stop ended it.
        """
        try:
            return waited(self, current_stop())
        except BaseException:
            self.cancel()
            raise

    # For the model's thread.

    def run(self, work: Callable[[], S]) -> S:
        """The result of `work` in the caller's context, under the stops of the running thread as well."""
        stops = current_stop()

        def under_both() -> S:
            with stopping(stops):
                current_stop().check()
                return work()

        return self.context.run(under_both)

    def settle(self, work: Callable[[], R]) -> None:
        """Give the caller the result of `work`, or its error."""
        try:
            result = self.run(work)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self.fail(error)
        else:
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give the caller this error, unless there is a result; what was begun for it ends."""
        self.stop.cancel()
        if not self.done():
            # The frames of our own errors hold the states of the model.
            self.set_exception(error.with_traceback(None) if isinstance(error, SemGradGuardError) else error)


def outcomes(tickets: Sequence[Ticket[R]]) -> list[R]:
    """The results of several requests, as `Ticket.outcome`.

    Raises:
        Exception: the first in their order; the others are then cancelled.
    """
    try:
        return [ticket.outcome() for ticket in tickets]
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise


def waited(future: Future[R], stops: Stops) -> R:
    """The result of a future, waited for under these stops.

    Raises:
        AnswerInterruptedError: a stop ended the waiting.
    """
    while stops:
        try:
            return future.result(SLICE)
        except FutureTimeoutError:
            if future.done():
                raise  # the work's own
            stops.check()
    return future.result()


class Pieces(Generic[P]):
    """Pieces from any thread, for one reader in another one or on an event loop."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ready: list[P] = []
        self._has_ended = False
        self._reader: Future[Sequence[P] | None] | None = None

    def put(self, piece: P) -> None:
        """One more piece; waits for nothing."""
        with self._lock:
            self._ready.append(piece)
            self._hand_over()

    def end(self) -> None:
        """There are no more."""
        with self._lock:
            self._has_ended = True
            self._hand_over()

    def next(self) -> Future[Sequence[P] | None]:
        """All pieces that are there, as soon as there is one; None behind the last."""
        with self._lock:
            reader = self._reader = Future()
            self._hand_over()
            return reader

    def _hand_over(self) -> None:
        reader = self._reader
        if reader is None or not (self._ready or self._has_ended):
            return
        self._reader = None
        if reader.set_running_or_notify_cancel():
            pieces, self._ready = self._ready or None, []
            reader.set_result(pieces)
