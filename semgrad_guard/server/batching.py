"""Requests that are answered together: they join and leave at every step, or where a model cannot, in whole runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from semgrad_guard.engine.generation.running_batch import BatchRequest, RunningAnswer
from semgrad_guard.engine.interruption import Stops, current_stop, stopping
from semgrad_guard.engine.replay.memory_budget import Memory
from semgrad_guard.errors import AnswerInterruptedError, SemGradGuardError
from semgrad_guard.server.writing import AnswerRequest, Assignment, Writer

R = TypeVar("R")
Batching = Literal["steps", "together", "equal_lengths", "none"]
"""How requests share a model: they join and leave at any step; those that wait and are alike run together, whatever the
lengths of their prompts, or with prompts of equal length; not at all.
"""

ROWS = 32
"""Answers that are written at once."""
MEMORY = Memory(logits=256 << 20, activations=1 << 30, outputs=512 << 20)
"""The most that a batch of so many answers may hold for their scores."""
_CELLS = 1 << 16  # tokens of a batch, padding counted: they bound its memory
_READ = 2048  # tokens of prompts that are read between two steps of the answers that are being written
_LINGER = 4  # steps that a finished answer waits for others to be scored with


@dataclass(eq=False)
class Job:
    """Work for a model's thread: a request to answer, or other `work`. Its future is settled once.

    It runs in the caller's context, and so under the caller's stops. `assignment` is the request, once it was read.
    """

    context: Context
    request: AnswerRequest | None = None
    work: Callable[[], Any] | None = None
    assignment: Assignment | None = None
    future: Future[Any] = field(default_factory=Future[Any])

    @property
    def assigned(self) -> Assignment:
        """The request as it was read.

        Raises:
            RuntimeError: it was not read.
        """
        if self.assignment is None:
            raise RuntimeError("the request of this job was not read")
        return self.assignment

    def begin(self) -> bool:
        """Whether a caller still waits; from then on, the thread has to settle it."""
        return self.future.set_running_or_notify_cancel()

    def run(self, work: Callable[[], R]) -> R:
        """The result of `work` in the caller's context, under the stops of the running thread as well."""
        stops = current_stop()

        def under_both() -> R:
            with stopping(stops):
                current_stop().check()
                return work()

        return self.context.run(under_both)

    def settle(self, work: Callable[[], Any]) -> None:
        """Give the caller the result of `work`, or its error."""
        try:
            result = self.run(work)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self.fail(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give the caller this error."""
        # The frames of our own errors hold the states of the model.
        self.future.set_exception(error.with_traceback(None) if isinstance(error, SemGradGuardError) else error)


class Batcher(Protocol):
    """Answers requests with one model, in the model's thread.

    The error of one request is not another's: its caller gets it, and the other requests continue. `looks_behind`: a
    request may begin together with the first of the queue, before others between them, which cannot.
    """

    @property
    def looks_behind(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        ...

    def has_room(self, assignments: Sequence[Assignment]) -> bool:
        """Whether all of these can begin now; where nothing is being written, one always can."""
        ...

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begin to answer requests, which have been read."""
        ...

    def step(self) -> None:
        """Continue the answers that are being written."""
        ...


def batcher_of(writer: Writer) -> tuple[Batching, Batcher]:
    """How requests can share a model, and their batcher. The first call makes the model's self-check."""
    rows = min(ROWS, writer.model.max_batch or ROWS)
    if rows > 1 and writer.model.joins:
        return "steps", RunningRequests(writer, rows=rows)
    if rows > 1 and writer.model.pads:
        return "together", WholeRuns(writer, rows=rows)
    if rows > 1 and writer.model.stacks:
        return "equal_lengths", WholeRuns(writer, rows=rows, pads=False)
    return "none", WholeRuns(writer, rows=1)


class WholeRuns:
    """Each run of the model answers one request, or several that are alike, from the first token to the last.

    Up to so many `rows`; where it `pads`, their prompts may be of unequal length.
    """

    is_idle, looks_behind = True, True

    def __init__(self, writer: Writer, *, rows: int = ROWS, pads: bool = True) -> None:
        self._writer, self._most, self._pads = writer, rows, pads

    def has_room(self, assignments: Sequence[Assignment]) -> bool:
        """Whether these can be one run: of the same options and form, with no client that listens."""
        first, *others = assignments
        rows = sum(len(one.options) for one in assignments)
        longest = max(len(one.prompt.ids) + one.options[0].max_tokens for one in assignments)
        limit = self._writer.model.fixed_positions
        fit = rows <= self._most and rows * longest <= _CELLS and (limit is None or longest <= limit)
        level = self._pads or len({len(one.prompt.ids) for one in assignments}) == 1
        return not others or (fit and level and all(_alike(first, other) for other in others))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Answer them, one alone under its stops; where several fail, each by itself."""
        if self._most == 1:  # nor do the answers to one request share a run
            for job in jobs:
                job.settle(lambda job=job: self._writer.written_singly(job.assigned))
            return
        drafts = None
        if len(jobs) > 1:
            with suppress(BaseException):  # raised again by the request that causes it
                drafts = self._writer.written([job.assigned for job in jobs])
        for index, job in enumerate(jobs):
            if drafts is None:
                _write_alone(self._writer, job)
            else:
                job.settle(lambda own=drafts[index]: own)

    def step(self) -> None:
        """Nothing is left to continue."""


def _alike(first: Assignment, other: Assignment) -> bool:
    one, two = first.request, other.request
    same = one.options == two.options and one.form == two.form and first.options[0] == other.options[0]
    return same and one.options.seed is None and one.on_piece is None and two.on_piece is None


@dataclass(eq=False)
class _Writing:
    """A request that is being written, its answers in rows of the batch; `waited` counts the steps since its end."""

    job: Job
    rows: Sequence[RunningAnswer]
    stops: Stops
    waited: int = 0

    @property
    def done(self) -> bool:
        """Whether all its answers are."""
        return all(row.done for row in self.rows)

    @property
    def error(self) -> Exception | None:
        """The error that ended one of its answers early."""
        return next((row.error for row in self.rows if row.error), None)


class RunningRequests:
    """Requests join a running batch at any step, and leave it when they are done."""

    looks_behind = False

    def __init__(self, writer: Writer, *, rows: int = ROWS) -> None:
        self._writer, self._most = writer, rows
        self._batch = writer.model.running_batch(writer.estimator.objective)
        self._writing: list[_Writing] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    def has_room(self, assignments: Sequence[Assignment]) -> bool:
        """Whether all of these can join now."""
        new = [(one.prompt, options) for one in assignments for options in one.options]
        if self.is_idle and len(assignments) == 1:
            return True
        read = sum(len(one.prompt.ids) for one in assignments)
        rows = len(self._batch.rows) + len(new)
        return rows <= self._most and read <= _READ and self._batch.has_room(new, cells=_CELLS)

    def begin(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of requests, next to those that are being written.

        A request that cannot join is written by itself, between two steps of the others.
        """
        joining: list[Job] = []
        for job in jobs:
            if self._can_join(job.assigned):
                joining.append(job)
            else:
                _write_alone(self._writer, job)
        if joining:
            try:
                self._batch.require_the_same_model()
            except AnswerInterruptedError as error:  # the model was changed: this ends old answers, and no new ones
                self._end([writing for writing in self._writing if not writing.done], error)
            self._join(joining)

    def _can_join(self, assignment: Assignment) -> bool:
        try:
            fits = len(assignment.options) <= self._most
            return fits and all(self._batch.takes(assignment.prompt, options) for options in assignment.options)
        except Exception:  # noqa: BLE001 - raised again where it is written
            return False

    def _join(self, jobs: Sequence[Job]) -> None:
        """Read prompts in one pass, or where that fails one by one.

        The pass that reads one prompt ends when its client leaves; one that reads several, only with the server.
        """
        requests = [
            BatchRequest(job.assigned.prompt, options, job.assigned.on_piece())
            for job in jobs
            for options in job.assigned.options
        ]
        alone = jobs[0] if len(jobs) == 1 else None
        try:
            rows = iter(alone.run(lambda: self._batch.join(requests)) if alone else self._batch.join(requests))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            if alone:
                alone.fail(error)
            else:
                for job in jobs:
                    self._join([job])
            return
        for job in jobs:
            own = [next(rows) for _ in job.assigned.options]
            self._writing.append(_Writing(job, own, job.context.run(current_stop)))

    def step(self) -> None:
        """One more token of every answer, and the scores of those that are done."""
        for writing in list(self._writing):
            try:
                writing.stops.check()
            except AnswerInterruptedError as error:  # its client has left, or its time is over
                self._end([writing], error)
        try:
            self._batch.step()
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end([writing for writing in self._writing if not writing.done], error)
        self._settle()

    def _settle(self) -> None:
        """Score finished answers: together with others that soon will be, as long as that is a matter of steps."""
        for writing in [writing for writing in self._writing if writing.done]:
            if error := writing.error:
                self._end([writing], error)
        done = [writing for writing in self._writing if writing.done]
        for writing in done:
            writing.waited += 1
        enough = max(1, len(self._batch.rows) // 4)
        if done and (not self._batch.rows or len(done) >= enough or max(one.waited for one in done) > _LINGER):
            self._writing = [writing for writing in self._writing if not writing.done]
            self._deliver(done)

    def _deliver(self, done: Sequence[_Writing]) -> None:
        try:
            generations = iter(self._batch.generations([row for writing in done for row in writing.rows]))
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for writing in done:
                writing.job.fail(error)
            return
        with self._writer.model.turn:  # in which the model is looked at once
            for writing in done:
                own, job = [next(generations) for _ in writing.rows], writing.job
                if error := writing.error:  # a client did not take the last piece
                    job.fail(error)
                else:
                    job.settle(lambda job=job, own=own: self._writer.drafts(job.assigned, own))

    def _end(self, ended: Sequence[_Writing], error: BaseException) -> None:
        self._writing = [writing for writing in self._writing if writing not in ended]
        self._batch.drop(row for writing in ended for row in writing.rows)
        for writing in ended:
            writing.job.fail(error)


def _write_alone(writer: Writer, job: Job) -> None:
    """Write a request in a run of its own, under its stops."""
    job.settle(lambda: writer.written([job.assigned])[0])
