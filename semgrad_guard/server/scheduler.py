"""`ModelQueue`: the server's view of a model. `Scheduler` is that of a model in this process, and `ReportedQueue` that
of another server's model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

from semgrad_guard.engine.answers.request import Pieces, Ticket
from semgrad_guard.engine.answers.sentences import Segment
from semgrad_guard.engine.answers.text import Piece
from semgrad_guard.engine.answers.worker import Batching
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import AnswerCancelledError, InputError, QueueFullError
from semgrad_guard.guard import Answerer, Draft, Iterated, Work, ain_time, cancelling, read_off_loop
from semgrad_guard.guard.reported import ReportedScorer, prompt_of
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.writing import AnswerRequest, Assignment, ForeignText, judged, segments, token_pieces

T = TypeVar("T")
RETRY = 5
"""Seconds after which a client that was refused may try again."""
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

    def live(self, request: AnswerRequest) -> LiveAnswers:
        """An answer that is being written."""
        return LiveAnswers(self, request)

    async def judged(self, text: ForeignText) -> Draft[None]:
        """A text from elsewhere with its score, or without one; the record has the same form."""
        raise InputError(_NO_MODEL)

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """A text's sentences, each with an uncertainty of its own; None where none of its tokens has one.

        Raises:
            InputError: the estimator compares whole answers.
        """
        raise InputError(_NO_MODEL)

    async def pieces(self, text: str) -> tuple[str, ...]:
        """The text that each token of a text from elsewhere adds."""
        raise InputError(_NO_MODEL)

    def close(self) -> None:
        """Refuse the requests that wait, and stop."""


class Scheduler(ModelQueue):
    """A `ModelQueue` in this process: a bounded view of the model's worker.

    Requests are read in a thread of their own, in the order of their arrival: neither HTTP nor the model waits for it.

    Args:
        answerer: the model, and how its answers are scored.
        limit: how many requests may wait; one more is refused.

    Raises:
        EmptyLayerSpanError: the estimator has no layers to differentiate by in this model.
    """

    def __init__(self, answerer: Answerer, *, limit: int = 64) -> None:
        self.answerer, self.model, self.limit = answerer, answerer.model, limit
        self.name, self.estimator_name = self.model.name, answerer.estimator.name
        if (objective := answerer.estimator.objective).gradients:
            objective.span(self.model.n_layers)  # refused here, and not at each request
        self._open: dict[Stop, Ticket[Any] | None] = {}
        self._reader = ThreadPoolExecutor(1, "semgrad-guard-reader")
        self._closed = False
        self.model.worker.run(lambda: self.model.worker.look(self.model)).outcome()

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
        return await self._submit(lambda: Assignment.of(request, self.answerer).submit())

    async def judged(self, text: ForeignText) -> Draft[None]:
        return await self.work(lambda: judged(text, self.answerer))

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        return await self.work(lambda: segments(text, by, self.answerer))

    async def pieces(self, text: str) -> tuple[str, ...]:
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
        self._open[stop] = None
        try:
            with stopping(stop), cancelling(stop):
                return await ain_time(self._result(make, stop))
        finally:
            del self._open[stop]

    async def _result(self, make: Callable[[], Ticket[T]], stop: Stop) -> T:
        ticket = await read_off_loop(make, readers=self._reader)
        self._open[stop] = ticket
        return await asyncio.wrap_future(ticket)

    def _require_room(self) -> None:
        if self._closed:
            raise AnswerCancelledError(_ENDING)
        if self.depth >= self.limit:
            raise QueueFullError(
                f"{self.depth} requests wait for {self.model.name} already, which is the limit; try again later",
                retry_after=RETRY,
            )

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


class LiveAnswers(Iterated[Piece]):
    """An answer that a model of this server is writing: its pieces, then its scored draft (`Live`)."""

    def __init__(self, queue: ModelQueue, request: AnswerRequest) -> None:
        super().__init__(amake=self._shown)
        self._queue, self._request = queue, request
        self._drafts = list[Draft[Answer]]()

    async def _shown(self) -> AsyncGenerator[Piece]:
        pieces = Pieces[Piece]()

        def on_piece(piece: Piece) -> None:
            current_stop().check()
            pieces.put(piece)

        task = asyncio.ensure_future(self._queue.answer(replace(self._request, on_piece=on_piece)))
        task.add_done_callback(lambda _: pieces.end())
        try:
            while (ready := await asyncio.wrap_future(pieces.next())) is not None:
                for piece in ready:
                    yield piece
            self._drafts = await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work.at_once(lambda: self._drafts[0])


_WORDS = re.compile(r"\s*\S+|\s+$")


class ReportedQueue(ModelQueue):
    """Another server's model, whose answers are scored by the log-probabilities that they carry.

    Nothing waits here, and no other text can be scored.
    """

    def __init__(self, scorer: ReportedScorer) -> None:
        self.scorer, self.name, self.estimator_name = scorer, scorer.model, scorer.estimator

    async def judged(self, text: ForeignText) -> Draft[None]:
        prompt = prompt_of(text.conversation, text.form.tools)
        if text.reason is not None:
            return Draft(self.scorer.unscored(text.text, text.reason), None, prompt)
        verdict = self.scorer.verdict(
            text.text,
            text.entries,
            options=text.options,
            prompt=prompt,
            cut=text.cut,
            reasoning=text.reasoning,
            is_part=text.is_part,
        )
        parts = self.scorer.parts(text.entries, (), text.form.structure)
        return Draft(verdict.revised(**parts), None, prompt)

    async def pieces(self, text: str) -> tuple[str, ...]:
        return tuple(_WORDS.findall(text))
