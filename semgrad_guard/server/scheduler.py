"""`ModelQueue`: the server's view of a model. `Scheduler` is that of a model in this process, and `ReportedQueue` that
of another server's model."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

from semgrad_guard.engine.answers.batching import Batching
from semgrad_guard.engine.answers.request import Pieces, Ticket
from semgrad_guard.engine.answers.sentences import Segment
from semgrad_guard.engine.answers.text import Piece
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import AnswerCancelledError, InputError, QueueFullError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft, OnDoubt, Work, ain_time, cancelling, read_off_loop
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.writing import AnswerRequest, ForeignText, Writer, token_pieces

T = TypeVar("T")
logger = logging.getLogger("semgrad_guard.server")
_FIRST_GUESS = 5.0
"""Seconds from one finished request to the next, as long as none has been seen."""
_WEIGHT = 0.2
_ENDING = "the server is shutting down; try again later"
_NO_MODEL = "this server has no model of its own: it scores the answers of its upstream alone; see --scorer"


class ModelQueue:
    """The owner of a model, in this process or in another one. Its methods raise a `SemGradGuardError` if they fail.

    This one has no model: its subclasses answer and score.
    """

    name: str
    """The model's name."""
    estimator_name: str
    """The name of the estimator that scores the answers."""

    @property
    def batching(self) -> Batching | None:
        """How requests share the model; None as long as that is not known."""
        return None

    @property
    def depth(self) -> int:
        """How many requests wait, without those in work."""
        return 0

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return False

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many requests wait already.
            SemGradGuardError: any error of answering.
        """
        raise InputError(_NO_MODEL)

    async def judged(self, text: ForeignText) -> Draft[None]:
        """A text from elsewhere with its score, or without one; the record has the same form."""
        raise InputError(_NO_MODEL)

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """A text's sentences, each with an uncertainty of its own; None where none of its tokens has one.

        Raises:
            InputError: the estimator compares whole answers.
        """
        raise InputError(_NO_MODEL)

    def close(self) -> None:
        """Refuse the requests that wait, and stop."""


class Scheduler(ModelQueue):
    """A `ModelQueue` in this process: a bounded view of the model's worker.

    Requests are read in a thread of their own, in the order of their arrival: neither HTTP nor the model waits for it.

    Args:
        model: the model.
        estimator: scores its answers.
        limit: how many requests may wait; one more is refused.
        served: the model scores the texts of another server, and writes none itself.
        by_sentence: the action at a doubtful sentence; None: whole answers are judged.

    `batching` is None until the model was examined, which begins at once.

    Raises:
        EmptyLayerSpanError: the estimator has no layers to differentiate by in this model.
    """

    def __init__(
        self,
        model: LanguageModel,
        estimator: Estimator,
        *,
        limit: int = 64,
        served: bool = False,
        by_sentence: OnDoubt | None = None,
    ) -> None:
        if estimator.objective.gradients:
            estimator.objective.span(model.n_layers)  # refused here, and not at each request
        self.model, self.estimator, self.limit = model, estimator, limit
        self.name, self.estimator_name = model.name, estimator.name
        self._writer = Writer(model, estimator, served=served, by_sentence=by_sentence)
        self._open: dict[Stop, Ticket[Any] | None] = {}
        self._reader = ThreadPoolExecutor(1, "semgrad-guard-reader")
        self._closed = False
        self._seconds_each, self._since = _FIRST_GUESS, time.monotonic()
        if self.batching is None:  # before a request waits for it; a failure is tried again with the first request
            model.worker.run(lambda: model.worker.look(model)).add_done_callback(_note_failure)

    @property
    def batching(self) -> Batching | None:
        return self.model.worker.batching(self.model)

    @property
    def depth(self) -> int:
        return sum(ticket is None or not (ticket.running() or ticket.done()) for ticket in list(self._open.values()))

    @property
    def is_full(self) -> bool:
        return self._closed or self.depth >= self.limit

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        return await self._submit(lambda: self._writer.submit(request))

    async def judged(self, text: ForeignText) -> Draft[None]:
        return await self.work(lambda: self._writer.judged(text))

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        return await self.work(lambda: self._writer.segments(text, by))

    async def pieces(self, text: str) -> tuple[str, ...]:
        """The text that each token of a text from elsewhere adds."""
        return await self.work(lambda: token_pieces(self.model, text))

    async def work(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in the model's thread in its order. A cancelled task stops it.

        Raises:
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the current deadline was over before it was done.
        """
        return await self._submit(lambda: self.model.worker.run(work))

    async def _submit(self, make: Callable[[], Ticket[T]]) -> T:
        self._require_room()
        stop = Stop()
        if not self._open:
            self._since = time.monotonic()
        self._open[stop] = None
        try:
            with stopping(stop), cancelling(stop):
                return await ain_time(self._result(make, stop))
        finally:
            del self._open[stop]

    async def _result(self, make: Callable[[], Ticket[T]], stop: Stop) -> T:
        ticket = await read_off_loop(make, readers=self._reader)
        ticket.add_done_callback(self._note_pace)
        self._open[stop] = ticket
        return await asyncio.wrap_future(ticket)

    def _require_room(self) -> None:
        if self._closed:
            raise AnswerCancelledError(_ENDING)
        if self.depth >= self.limit:
            seconds = self.retry_after()
            raise QueueFullError(
                f"{self.depth} requests wait for {self.model.name} already, which is the limit. Try again "
                f"in {seconds} s",
                retry_after=seconds,
            )

    def retry_after(self) -> int:
        """Whole seconds after which there should be room again, at least 1."""
        return max(1, math.ceil(self._seconds_each * (self.depth + 1)))

    def close(self) -> None:
        """Refuse the requests that wait, stop those in work, and return once the model works for none of them."""
        self._closed = True
        for stop in list(self._open):
            stop.cancel()
        self._reader.shutdown()
        tickets = [ticket for ticket in self._open.values() if ticket is not None]
        for ticket in tickets:
            ticket.refuse(AnswerCancelledError(_ENDING))
        wait(tickets)

    def _note_pace(self, _: object) -> None:
        now = time.monotonic()
        self._seconds_each += _WEIGHT * (now - self._since - self._seconds_each)
        self._since = now


def _note_failure(looked: Future[Any]) -> None:
    error = looked.exception()
    if error is not None and not isinstance(error, AnswerCancelledError):  # by the end of the process
        logger.warning("the model could not be looked at; the next request tries again: %r", error)


class LiveAnswers:
    """An answer that is being written, on the event loop: its pieces, then its scored draft (`Live`)."""

    def __init__(self, scheduler: ModelQueue, request: AnswerRequest) -> None:
        self._scheduler, self._request = scheduler, request
        self._pieces = Pieces[Piece]()
        self._task: asyncio.Task[list[Draft[Answer]]] | None = None

    def next(self) -> Work:
        """As `Live.next`."""
        return Work.awaited(self._next)

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work.awaited(self._draft)

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        return Work.awaited(self._close)

    async def _next(self) -> Sequence[Piece] | None:
        self._begun()
        return await asyncio.wrap_future(self._pieces.next())

    def _begun(self) -> asyncio.Task[list[Draft[Answer]]]:
        if self._task is None:

            def on_piece(piece: Piece) -> None:
                current_stop().check()
                self._pieces.put(piece)

            request = replace(self._request, on_piece=on_piece)
            self._task = asyncio.ensure_future(self._scheduler.answer(request))
            self._task.add_done_callback(lambda _: self._pieces.end())
        return self._task

    async def _draft(self) -> Draft[Answer]:
        return (await self._begun())[0]

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class ReportedQueue(ModelQueue):
    """Another server's model, whose answers are scored by the log-probabilities that they carry.

    Nothing waits here, and no other text can be scored.
    """

    def __init__(self, scorer: ReportedScorer) -> None:
        self.scorer, self.name, self.estimator_name = scorer, scorer.model, scorer.estimator

    async def judged(self, text: ForeignText) -> Draft[None]:
        return Draft(self.scorer.unscored(text.text, text.reason or _NO_MODEL), None)


def logprobs_for(body: Mapping[str, Any], found: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The log-probabilities that a client's request is about, of those that the score took."""
    if not body.get("logprobs") or found is None or any(entry.get("logprob") is None for entry in found):
        return None
    top = body.get("top_logprobs") or 0
    return [{**entry, "top_logprobs": list(entry.get("top_logprobs") or ())[:top]} for entry in found]
