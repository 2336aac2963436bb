"""`Worker`: one thread owns a model, and everything for the model waits in one queue.

Requests are submitted as data, and not as code, so that several of them can be answered together, whichever thread or
coroutine they come from. The thread begins with the first request and ends after some idle seconds. While it is idle it
holds neither model nor worker, so that weights are freed with their last user; while it works, its jobs hold both.

Why: docs/decisions.md#0140
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from semgrad_guard.engine.answers.batching import Batching, Key, RunningRequests, Writing
from semgrad_guard.engine.answers.request import Request, Ticket, Work
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.interruption import SLICE, Stop, start_thread
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError

R = TypeVar("R")

Job = Writing | Work
IDLE = 5.0
"""Seconds after which an idle thread ends."""
_ENDING = "the process is ending; nothing is answered any more"


class _Queue:
    """The jobs that wait, and the thread that does them: all that an idle thread holds."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Job] = deque()
        self.thread: threading.Thread | None = None
        self._closing = Stop()  # cancelled where the process ends

    def put(self, jobs: Sequence[Job], worker: Worker) -> None:
        """Append jobs, and see to it that a thread runs.

        Raises:
            AnswerCancelledError: the process is ending.
        """
        with self.changed:
            if self._closing.cancelled:
                raise AnswerCancelledError(_ENDING)
            self.waiting.extend(jobs)
            self.changed.notify()
            if self.thread is None:
                self.thread = start_thread(
                    partial(_serve, ref(worker), self),
                    name="semgrad-guard-worker",
                    stop=self._closing,
                )

    def take(self, wanted: Callable[[Job], bool]) -> Job | None:
        """Take the first such job out of the queue."""
        with self.changed:
            job = next(filter(wanted, self.waiting), None)
            if job is not None:
                self.waiting.remove(job)
            return job

    def listed(self) -> list[Job]:
        """The jobs in their order."""
        with self.changed:
            return list(self.waiting)

    def end(self, error: BaseException) -> None:
        """Give every caller that waits this error. The thread does no more jobs: the next one begins another thread."""
        with self.changed:
            left, self.waiting, self.thread = self.waiting, deque(), None
        for job in left:
            if job.begin():
                job.fail(error)

    def next_comes(self) -> bool:
        """Wait until there is a job. Where none comes, or the process ends, this thread is no longer the queue's."""
        until = time.monotonic() + IDLE
        with self.changed:
            while not (self.waiting or self._closing.cancelled) and (left := until - time.monotonic()) > 0:
                self.changed.wait(min(SLICE, left))
            if self.waiting and not self._closing.cancelled:
                return True
            self.thread = None
        if self._closing.cancelled:
            self.end(AnswerCancelledError(_ENDING))
        return False


def _serve(reference: ReferenceType[Worker], queue: _Queue) -> None:
    try:
        while queue.next_comes():
            if (worker := reference()) is not None:
                worker.work()
            del worker
    except BaseException as error:
        queue.end(error)
        raise


class Worker:
    """Answers the requests to one model in the order of their arrival, together as far as the model allows it."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew: after a fork, thread and requests are the parent's."""
        self._queue = _Queue()
        self._running: dict[Key, RunningRequests] = {}
        self._known: WeakKeyDictionary[WritingModel, Batching] = WeakKeyDictionary()

    @property
    def depth(self) -> int:
        """How many jobs wait, without those in work."""
        return len(self._queue.waiting)

    def submit(self, model: WritingModel, requests: Sequence[Request[R]]) -> list[Ticket[R]]:
        """Have requests answered; waits for nothing. The stops and the context of the caller go along.

        A thread that has the model's turn already, or that is the worker's own, would wait for itself: there the
        requests are answered at once.
        """
        several = len(requests) > 1
        jobs = [Writing.of(self._withdraw, request=request, model=model, of_several=several) for request in requests]
        return self._put(jobs, here=model.has_turn)

    def run(self, work: Callable[[], R]) -> Ticket[R]:
        """Have other work done between two steps of the answers that are being written, in its order."""
        return self._put([Work.of(self._withdraw, work=work)])[0]

    def batching(self, model: WritingModel) -> Batching | None:
        """How requests shared this model when it was last looked at; None as long as it was not."""
        return self._known.get(model)

    def look(self, model: WritingModel) -> Batching:
        """How requests share this model as it is now; for the model's thread.

        The first call, and one after a change of the model, makes its self-check: a hook may let rows see each other.
        """
        with model.turn:
            found = self._known[model] = "steps" if model.joins else "none"
            return found

    def _put(self, jobs: Sequence[Job], *, here: bool = False) -> list[Ticket[Any]]:
        if here or threading.current_thread() is self._queue.thread:
            for job in jobs:
                self._do_here(job)
        else:
            self._queue.put(jobs, self)
        return [job.ticket for job in jobs]

    def _do_here(self, job: Job) -> None:
        """Do a job at once, in the running thread."""
        job.begin()
        if not isinstance(job, Writing):
            job.settle(job.work)
            return
        try:
            running = RunningRequests(*self._key_of(job))
            running.begin([job])
            while not running.is_idle:
                running.step()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            job.fail(error)

    def _withdraw(self, ticket: Ticket[Any]) -> bool:
        """Take a request out of the queue: whether it was still there, and is the caller's to settle."""
        return self._queue.take(lambda job: job.ticket is ticket) is not None

    # The model's thread.

    def work(self) -> None:
        """Do the jobs of the queue until there are none, and nothing is being written."""
        try:
            while self._running or self._queue.waiting:
                self._end_the_late()
                self._begin_next()
                for key, running in list(self._running.items()):
                    running.step()
                    if running.is_idle:
                        del self._running[key]
        except BaseException as error:
            for running in self._running.values():
                running.end(error)
            self._running.clear()
            raise

    def _begin(self, running: RunningRequests, jobs: Sequence[Writing]) -> None:
        """Begin requests together."""
        self._running[running.key] = running
        try:
            with running.key[0].turn:  # in which the model is looked at once
                running.begin(jobs)
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for job in jobs:
                job.fail(error)

    def _end_the_late(self) -> None:
        """Jobs whose callers have left, or whose time is over, do not wait for their turn to learn it."""
        for job in self._queue.listed():
            try:
                job.stops.check()
            except AnswerInterruptedError as error:
                if self._takes(job):
                    job.fail(error)

    def _begin_next(self) -> None:
        """Do other work, or begin the oldest request and those that are written together with it.

        The job that has waited longest always begins, so that none is passed by for ever.
        """
        first: RunningRequests | None = None
        batch: list[Writing] = []
        for job in self._queue.listed():
            if not isinstance(job, Writing):
                if not batch and self._takes(job):
                    job.settle(job.work)
                break
            try:
                found = first or self._running.get(key := self._key_of(job)) or RunningRequests(*key)
                others = sum(running.rows for running in self._running.values() if running is not found)
                fits = found.has_room([*batch, job], beside=others)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                if self._takes(job):
                    job.fail(error)
                continue
            if not fits:
                break
            if self._takes(job):
                first = found
                batch.append(job)
        if first is not None:
            self._begin(first, batch)

    def _key_of(self, job: Writing) -> Key:
        """What the requests have in common that share a batch with this one."""
        return job.model, job.request.objective, job.run(lambda: self.look(job.model))

    def _takes(self, job: Job) -> bool:
        """Take a job out of the queue to do it: whether its caller still waits."""
        return self._queue.take(lambda other: other is job) is not None and job.begin()


_workers: WeakKeyDictionary[Scorer, Worker] = WeakKeyDictionary()
_lock = threading.Lock()


def worker_of(scorer: Scorer) -> Worker:
    """The one worker of a model, by its scorer: every `LanguageModel` of the same weights shares it."""
    with _lock:
        return _workers.setdefault(scorer, Worker())


def _renew_all() -> None:
    """After a fork: the parent's threads do not run here, and its lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    for worker in list(_workers.values()):
        worker.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
