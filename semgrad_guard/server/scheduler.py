"""`Scheduler`: one thread owns a model, and everything for the model waits in one queue.

Requests are submitted as data, and not as code, so that the inside may answer several of them together.

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
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from semgrad_guard.engine import model_threads
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.errors import AnswerCancelledError, QueueFullError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Draft, ain_time, cancelling
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.batching import Batcher, Batching, Job, batcher_of
from semgrad_guard.server.writing import AnswerRequest, ForeignText, Writer

T = TypeVar("T")
logger = logging.getLogger("semgrad_guard.server")
_FIRST_GUESS = 5.0
"""Seconds from one finished request to the next, as long as none has been seen."""
_WEIGHT = 0.2


class ModelQueue(Protocol):
    """The owner of a model, in this process or in another one. Its methods raise a `SemGradGuardError` if they fail.

    `served` is true where the model only scores the texts of another server.
    """

    estimator: Estimator
    served: bool

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def batching(self) -> Batching | None:
        """How requests share the model; None as long as that is not known."""
        ...

    @property
    def depth(self) -> int:
        """How many requests wait, without those in work."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the model can still answer: without its thread or engine it never will."""
        ...

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many requests wait already.
            SemGradGuardError: any error of answering.
        """
        ...

    async def judged(self, text: ForeignText) -> Draft[None]:
        """A text from elsewhere with its score, or without one; the record has the same form."""
        ...

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """A text's sentences or clauses, each with an uncertainty of its own; None where none of its tokens has one.

        Raises:
            InputError: the estimator compares whole answers.
        """
        ...

    def close(self) -> None:
        """Refuse the requests that wait, and stop."""
        ...


class _Closing(Stop):
    """Stops the work of the model's thread, and wakes it where it waits."""

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self._changed = changed

    def cancel(self) -> None:
        """As `Stop.cancel`."""
        with self._changed:
            super().cancel()
            self._changed.notify_all()


class Scheduler:
    """A `ModelQueue` in this process: answers requests in the order of their arrival, together as far as possible.

    Args:
        model: the model; nothing else runs it while the scheduler lives.
        estimator: scores its answers.
        limit: how many requests may wait; one more is refused.
        prompt_template: the name for the form of the prompts.
        served: the model scores the texts of another server, and writes none itself.

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
        prompt_template: str = "chat",
        served: bool = False,
    ) -> None:
        if estimator.objective.gradients:
            estimator.objective.span(model.n_layers)  # refused here, and not at each request
        self.model, self.estimator, self.limit = model, estimator, limit
        self.served = served
        self.batching: Batching | None = None
        self._writer = Writer(model, estimator, prompt_template=prompt_template, served=served)
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = _Closing(self._changed)
        self._seconds_each, self._since = _FIRST_GUESS, time.monotonic()
        self._thread = model_threads.start(
            self._run, name=f"semgrad-guard-{model.name}", stop=self._closing, only_runs_the_model=True
        )

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def depth(self) -> int:
        """As `ModelQueue.depth`."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """As `ModelQueue.is_full`."""
        return self._closing.cancelled or self.depth >= self.limit

    @property
    def is_alive(self) -> bool:
        """As `ModelQueue.is_alive`."""
        return self._thread.is_alive()

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """As `ModelQueue.answer`."""
        return await self._submit(lambda context: Job(context, request=request))

    async def judged(self, text: ForeignText) -> Draft[None]:
        """As `ModelQueue.judged`."""
        return await self.work(lambda: self._writer.judged(text))

    async def segments(self, text: ForeignText, by: By) -> list[tuple[Segment, float | None]]:
        """As `ModelQueue.segments`."""
        return await self.work(lambda: self._writer.segments(text, by))

    async def pieces(self, text: str) -> tuple[str, ...]:
        """The text that each token of a text from elsewhere adds."""
        return await self.work(lambda: self._writer.pieces(text))

    async def work(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in the model's thread in its order. A cancelled task stops it.

        Raises:
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the current deadline was over before it was done.
        """
        return await self._submit(lambda context: Job(context, work=work))

    async def _submit(self, make: Callable[[Context], Job]) -> Any:
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

    def retry_after(self) -> int:
        """Whole seconds after which there should be room again, at least 1."""
        return max(1, math.ceil(self._seconds_each * (self.depth + 1)))

    def close(self) -> None:
        """Refuse the requests that wait, stop those in work, and return once the model's thread has ended."""
        with self._changed:
            self._closing.cancel()
            left, self._waiting = list(self._waiting), deque()
        for job in left:
            if job.begin():
                job.fail(AnswerCancelledError("the server is shutting down; try again later"))
        self._thread.join()

    # The queue.

    def _put(self, job: Job) -> None:
        with self._changed:
            if self._closing.cancelled:
                raise AnswerCancelledError("the server is shutting down; try again later")
            if len(self._waiting) >= self.limit:
                seconds = self.retry_after()
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for {self.model.name} already, which is the limit. Try again "
                    f"in {seconds} s",
                    retry_after=seconds,
                )
            self._waiting.append(job)
            self._changed.notify()

    def _drop(self, job: Job) -> bool:
        """Take a job out of the queue: whether it was still there, and is the caller's to settle."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    # The model's thread.

    def _run(self) -> None:
        batcher: Batcher | None = None
        try:
            batcher = self._look()  # before a request waits for it; a failure is tried again with the first request
        except BaseException as error:  # noqa: BLE001 - logged, and raised again to a request
            if not self._closing.cancelled:
                logger.warning("the model could not be looked at; the next request tries again: %r", error)
        while self._wait(idle=batcher is None or batcher.is_idle):
            if batcher is None and (batcher := self._look_for_a_request()) is None:
                continue
            jobs = self._next(batcher)
            if jobs and jobs[0].work is not None:
                jobs[0].settle(jobs[0].work)
            elif jobs:
                batcher.begin(jobs)
            del jobs  # an idle thread holds no answer
            batcher.step()

    def _look(self) -> Batcher:
        """How requests share the model."""
        self.batching, batcher = batcher_of(self._writer)
        return batcher

    def _look_for_a_request(self) -> Batcher | None:
        """Look again; where that fails too, the first request in the queue gets the error."""
        try:
            return self._look()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            for job in self._queued()[:1]:
                if self._takes(job):
                    job.fail(error)
            return None

    def _wait(self, *, idle: bool) -> bool:
        """Wait for something to do; in vain once the scheduler is closed and nothing is being written."""
        with self._changed:
            if idle:
                self._changed.wait_for(lambda: self._waiting or self._closing.cancelled)
                self._since = time.monotonic()
            return not idle or (bool(self._waiting) and not self._closing.cancelled)

    def _next(self, batcher: Batcher) -> list[Job]:
        """The work that begins now: other work, or the oldest request and those that are written together with it.

        The job that has waited longest always begins, so that none is passed by for ever.
        """
        batch: list[Job] = []
        for job in self._queued():
            if job.request is None and not batch:
                return [job] if self._takes(job) else []
            if job.request is not None and not self._reads(job):
                continue
            if job.request is not None and batcher.has_room([one.assigned for one in (*batch, job)]):
                if self._takes(job):
                    batch.append(job)
            elif not (batch and batcher.looks_behind):
                break
        return batch

    def _queued(self) -> list[Job]:
        with self._changed:
            return list(self._waiting)

    def _takes(self, job: Job) -> bool:
        """Take a job out of the queue to do it: whether its caller still waits."""
        waits = self._drop(job) and job.begin()
        if waits:
            job.future.add_done_callback(self._note_pace)
        return waits

    def _reads(self, job: Job) -> bool:
        """Read a request, once; one that cannot be answered gets its error, and leaves the queue."""
        if job.assignment is None and job.request is not None:
            try:
                job.assignment = job.context.run(self._writer.assigned, job.request)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                if self._takes(job):
                    job.fail(error)
                return False
        return True

    def _note_pace(self, _: object) -> None:
        now = time.monotonic()
        self._seconds_each += _WEIGHT * (now - self._since - self._seconds_each)
        self._since = now


class LiveAnswers:
    """An answer that is being written, on the event loop: its pieces, then its scored draft (`AsyncLiveDraft`)."""

    def __init__(self, scheduler: ModelQueue, request: AnswerRequest) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def on_piece(piece: str) -> None:
            current_stop().check()
            loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._task = asyncio.ensure_future(scheduler.answer(replace(request, on_piece=on_piece)))
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
