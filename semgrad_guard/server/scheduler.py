"""`Scheduler`: one thread owns a model, and everything that is asked of the model waits for its turn.

Requests are submitted as what they ask for, and not as code, so that the inside may answer several of them together.

Why: docs/adr/0140-one-thread-owns-a-model.md
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.engine import model_threads
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.errors import AnswerCancelledError, InputError, QueueFullError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.guard import Draft, ain_time, cancelling
from semgrad_guard.records import Message
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.batching import Batcher, Batching, batcher_of
from semgrad_guard.server.model_queue import ModelQueue
from semgrad_guard.server.turns import Turn
from semgrad_guard.server.writing import AnswerRequest, Assignment, Writer

T = TypeVar("T")
logger = logging.getLogger("semgrad_guard.server")
_FIRST_GUESS = 5.0
"""Seconds from one finished request to the next, as long as none has been seen."""
_WEIGHT = 0.2


@dataclass(eq=False)
class _Job(Turn[Any]):
    """A turn that waits: a request to answer, or other work. `assignment` is the request, once it was read."""

    request: AnswerRequest | None = None
    work: Callable[[], Any] | None = None
    assignment: Assignment | None = None


class _Closing(Stop):
    """Stops what the model's thread does, and wakes it where it waits."""

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self._changed = changed

    def cancel(self) -> None:
        """As `Stop.cancel`."""
        with self._changed:
            super().cancel()
            self._changed.notify_all()


class Scheduler:
    """Answers requests with one model, in the order in which they came: together as far as the model can.

    Args:
        model: the model; nobody else runs it while the scheduler lives.
        estimator: scores its answers.
        limit: how many requests may wait; one more is refused.
        prompt_template: the name for the form of the prompts.
        served: the model scores what others have written, and writes nothing itself.

    `batching` says how requests share the model; None until the model was looked at, which begins at once.

    Raises:
        EmptyLayerSpanError: the estimator has no layers to differentiate by in this model.
    """

    def __init__(
        self,
        model: LanguageModel,
        estimator: Estimator,
        *,
        limit: int = 64,
        prompt_template: str = "chat",
        served: bool = False,
    ) -> None:
        if estimator.objective.gradients:
            estimator.objective.span(model.n_layers)  # refused here, and not at each request
        self.model, self.estimator, self.limit = model, estimator, limit
        self.served = served
        self.batching: Batching | None = None
        self._writer = Writer(model, estimator, prompt_template=prompt_template, served=served)
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = _Closing(self._changed)
        self._turn_seconds, self._since = _FIRST_GUESS, time.monotonic()
        self._thread = model_threads.start(
            self._run, name=f"semgrad-guard-{model.name}", stop=self._closing, only_runs_the_model=True
        )

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def depth(self) -> int:
        """How many requests wait, those that are being worked on aside."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return self._closing.cancelled or self.depth >= self.limit

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many wait already.
            SemGradGuardError: whatever answering raises.
        """
        return await self._submit(lambda context: _Job(context, request=request))

    async def scored(
        self,
        conversation: tuple[Message, ...],
        text: str,
        *,
        form: AnswerForm | None = None,
        cut: bool = False,
        reasoned: bool = False,
    ) -> Draft[None]:
        """A text from elsewhere as the answer to a conversation, with its score."""
        options = {} if form is None else form.template_options
        answerer = self._writer.answerer()
        return await self.work(
            lambda: answerer.scored(conversation, text, template_options=options, cut=cut, reasoned=reasoned)
        )

    async def segments(
        self, conversation: tuple[Message, ...], text: str, *, by: By
    ) -> list[tuple[Segment, float | None]]:
        """A text's sentences or clauses, each with an uncertainty of its own; None where none of its tokens has one.

        Raises:
            InputError: the estimator compares whole answers.
        """
        estimator = self.estimator
        if not isinstance(estimator, ReplayEstimator):
            raise InputError(f"{estimator.name} compares whole answers; leave 'by' out, or serve with hybridgrad")

        def work() -> list[tuple[Segment, float | None]]:
            found = self.model.score(conversation, text, by=by, objective=estimator.objective)
            return [(each, None if each.scores is None else estimator.value(each.scores)) for each in found]

        return await self.work(work)

    async def pieces(self, text: str) -> tuple[str, ...]:
        """What each token of a text from elsewhere adds to it."""
        return await self.work(lambda: self._writer.pieces(text))

    async def unscored(self, text: str, reason: str, form: AnswerForm | None = None) -> Draft[None]:
        """A text from elsewhere that cannot be scored, with the reason."""
        options = {} if form is None else form.template_options
        answerer = self._writer.answerer()
        return await self.work(lambda: Draft(answerer.unscored(text, reason, options), None))

    async def work(self, work: Callable[[], T]) -> T:
        """What `work` returns, run in the model's thread when its turn has come. A cancelled task stops it.

        Raises:
            QueueFullError: too many wait already.
            DeadlineExceededError: the current deadline was over before it was done.
        """
        return await self._submit(lambda context: _Job(context, work=work))

    async def _submit(self, make: Callable[[Context], _Job]) -> Any:
        stop = Stop()
        with stopping(stop), cancelling(stop):
            job = make(copy_context())
            self._put(job)
            try:
                return await ain_time(asyncio.wrap_future(job.future))
            finally:
                if not job.future.done() or job.future.cancelled():
                    stop.cancel()
                    self._drop(job)

    @property
    def is_alive(self) -> bool:
        """Whether the thread that owns the model runs: without it nothing will ever be answered."""
        return self._thread.is_alive()

    def retry_after(self) -> int:
        """Whole seconds after which there should be room again, at least 1."""
        return max(1, math.ceil(self._turn_seconds * (self.depth + 1)))

    def close(self) -> None:
        """Let go of what waits, stop what is being written, and return once the model's thread has ended."""
        with self._changed:
            self._closing.cancel()
            left, self._waiting = list(self._waiting), deque()
        for turn in left:
            if turn.future.set_running_or_notify_cancel():
                turn.future.set_exception(AnswerCancelledError("the server is shutting down; ask again later"))
        self._thread.join()

    # The queue.

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._closing.cancelled:
                raise AnswerCancelledError("the server is shutting down; ask again later")
            if len(self._waiting) >= self.limit:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for {self.model.name} already, which is the limit. Ask again "
                    f"in {self.retry_after()} s",
                    retry_after=self.retry_after(),
                )
            self._waiting.append(job)
            self._changed.notify()

    def _drop(self, job: _Job) -> bool:
        """Take a job out of the queue: whether it was still there, and is the caller's to settle."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    # The model's thread.

    def _run(self) -> None:
        batcher = self._look_early()
        while self._wait(idle=batcher is None or batcher.is_idle):
            if batcher is None and (batcher := self._look_for_a_request()) is None:
                continue
            jobs = self._next(batcher)
            if jobs and jobs[0].work is not None:
                jobs[0].settle(jobs[0].work)
            elif jobs:
                batcher.begin([(job, job.assignment) for job in jobs if job.assignment is not None])
            del jobs  # an idle thread holds no answer
            batcher.step()

    def _look(self) -> Batcher:
        """How requests share the model."""
        self.batching, batcher = batcher_of(self._writer)
        return batcher

    def _look_early(self) -> Batcher | None:
        """Look before anybody waits for it; what fails now is tried again with the first request."""
        try:
            return self._look()
        except BaseException as error:  # noqa: BLE001 - told in the log, and again to a request
            if not self._closing.cancelled:
                logger.warning("the model could not be looked at; the next request tries again: %r", error)
            return None

    def _look_for_a_request(self) -> Batcher | None:
        """Look again; where that fails too, the request that waits is told why."""
        try:
            return self._look()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            if (job := self._head()) is not None and self._takes(job):
                job.fail(error)
            return None

    def _wait(self, *, idle: bool) -> bool:
        """Wait for something to do; in vain once the scheduler is closed and nothing is being written."""
        with self._changed:
            if idle:
                self._changed.wait_for(lambda: self._waiting or self._closing.cancelled)
                self._since = time.monotonic()
            return not idle or (bool(self._waiting) and not self._closing.cancelled)

    def _next(self, batcher: Batcher) -> list[_Job]:
        """What begins now: other work, or the oldest request and those that are written together with it.

        What has waited longest always begins, so that nobody who is passed by is passed by for ever.
        """
        found: list[_Job] = []
        for job in self._queued():
            if job.request is None and not found:
                return [job] if self._takes(job) else []
            if job.request is not None and not self._reads(job):
                continue
            orders = [each.assignment for each in (*found, job) if each.assignment is not None]
            if job.request is not None and batcher.has_room(orders):
                if self._takes(job):
                    found.append(job)
            elif not (found and batcher.looks_behind):
                break
        return found

    def _queued(self) -> list[_Job]:
        with self._changed:
            return list(self._waiting)

    def _head(self) -> _Job | None:
        with self._changed:
            return self._waiting[0] if self._waiting else None

    def _takes(self, job: _Job) -> bool:
        """Take a job out of the queue to do it: whether somebody still waits for it."""
        waits = self._drop(job) and job.begin()
        if waits:
            job.future.add_done_callback(self._note_pace)
        return waits

    def _reads(self, job: _Job) -> bool:
        """Read a request, once; one that cannot be answered is told so, and leaves the queue."""
        if job.assignment is None and job.request is not None:
            try:
                job.assignment = job.context.run(self._writer.assigned, job.request)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                if self._takes(job):
                    job.fail(error)
                return False
        return True

    def _note_pace(self, _: object) -> None:
        now = time.monotonic()
        self._turn_seconds += _WEIGHT * (now - self._since - self._turn_seconds)
        self._since = now


class LiveAnswers:
    """An answer that is being written, on the event loop: its pieces, then its scored draft (`AsyncLiveDraft`)."""

    def __init__(self, scheduler: ModelQueue, request: AnswerRequest) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def heard(piece: str) -> None:
            current_stop().check()
            loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._task = asyncio.ensure_future(scheduler.answer(replace(request, heard=heard)))
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    async def __aiter__(self) -> Any:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def draft(self) -> Draft[Answer]:
        """The whole answer with its score."""
        return (await self._task)[0]

    async def aclose(self) -> None:
        """Stop the model; harmless at any time."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
