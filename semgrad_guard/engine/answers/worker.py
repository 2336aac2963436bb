"""`Worker`: one thread owns a model, and everything for the model waits in one queue.

Requests are submitted as data, and not as code, so that several of them can be answered together, whichever thread or
coroutine they come from. The thread begins with the first request and ends after some idle seconds. While it is idle
neither it nor its worker holds a model, so that weights are freed with their last user.

Why: docs/decisions.md#0140
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from semgrad_guard.engine.answers.running import Job, Key, Request, RunningRequests, Work, Writing
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.interruption import SLICE, Stop, Ticket, start_thread
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError

R = TypeVar("R")

IDLE = 5.0
"""Seconds after which an idle thread ends."""
_ENDING = "the process is ending; nothing is answered any more"


class Worker:
    """Answers the requests to one model in the order of their arrival, together as far as the model allows it."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew: after a fork, thread and requests are the parent's."""
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Key, RunningRequests] = {}
        self._thread: threading.Thread | None = None
        self._closing = Stop()  # cancelled where the process ends

    @property
    def depth(self) -> int:
        """How many jobs wait, without those in work."""
        return len(self._waiting)

    def submit(self, model: WritingModel, requests: Sequence[Request[R]]) -> list[Ticket[R]]:
        """Have requests answered; waits for nothing. The stops and the context of the caller go along.

        A thread that has the model's turn already, or that is the worker's own, would wait for itself: there the
        requests are answered at once.

        Raises:
            AnswerCancelledError: the process is ending.
        """
        several = len(requests) > 1
        jobs = [Writing(request=request, model=model, of_several=several) for request in requests]
        for job in jobs:
            job.draw()
        if model.has_turn or threading.current_thread() is self._thread:
            for job in jobs:
                _do_here(job)
        else:
            self._put([one for job in jobs for one in (job, *job.drawings.values())])
        return [job.ticket for job in jobs]

    def run(self, work: Callable[[], R]) -> Ticket[R]:
        """Have other work done between two steps of the answers that are being written, in its order."""
        job = Work(work)
        if threading.current_thread() is self._thread:
            job.ticket.set_running_or_notify_cancel()
            job.ticket.settle(work)
        else:
            self._put([job])
        return job.ticket

    def _put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            if self._closing.cancelled:
                raise AnswerCancelledError(_ENDING)
            self._waiting.extend(jobs)
            self._changed.notify()
            if self._thread is None:
                self._thread = start_thread(self._serve, name="semgrad-guard-worker", stop=self._closing)

    # The model's thread.

    def _serve(self) -> None:
        try:
            while self._next_comes():
                self._work()
        except BaseException as error:
            self._refuse_all(error)
            raise

    def _next_comes(self) -> bool:
        """Wait until there is a job. Where none comes, or the process ends, this thread is no longer the worker's."""
        until = time.monotonic() + IDLE
        with self._changed:
            while not (self._waiting or self._closing.cancelled) and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(SLICE, left))
            if self._waiting and not self._closing.cancelled:
                return True
            self._thread = None
        if self._closing.cancelled:
            self._refuse_all(AnswerCancelledError(_ENDING))
        return False

    def _refuse_all(self, error: BaseException) -> None:
        """Give every caller that waits this error. The thread does no more jobs: the next one begins another thread."""
        with self._changed:
            left, self._waiting, self._thread = self._waiting, deque(), None
        for job in left:
            if job.ticket.set_running_or_notify_cancel():
                job.ticket.fail(error)

    def _work(self) -> None:
        """Do the jobs of the queue until there are none, and nothing is being written."""
        try:
            while self._running or self._waiting:
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

    def _end_the_late(self) -> None:
        """Jobs whose callers have left, or whose time is over, do not wait for their turn to learn it."""
        for job in self._listed():
            try:
                job.ticket.stops.check()
            except AnswerInterruptedError as error:
                if self._takes(job):
                    job.ticket.fail(error)

    def _begin_next(self) -> None:
        """Do other work, or begin the oldest request and those that are written together with it.

        The job that has waited longest always begins, so that none is passed by for ever.
        """
        first: RunningRequests | None = None
        batch: list[Writing] = []
        for job in self._listed():
            if not isinstance(job, Writing):
                if not batch and self._takes(job):
                    job.ticket.settle(job.work)
                break
            try:
                found = first or self._running.get(job.key) or RunningRequests(*job.key)
                is_alone = not batch and not any(running.is_running for running in self._running.values())
                rows = sum(running.rows for running in self._running.values())
                # First the model is looked at, which may take long: under the stops of this caller.
                fits = job.ticket.run(partial(found.has_room, [*batch, job], beside=rows)) or is_alone
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                if self._takes(job):
                    job.ticket.fail(error)
                continue
            if not fits:
                break
            if self._takes(job):
                first = found
                batch.append(job)
        if first is not None:
            self._begin(first, batch)

    def _begin(self, running: RunningRequests, jobs: Sequence[Writing]) -> None:
        """Begin requests together."""
        self._running[running.key] = running
        try:
            with running.key[0].turn:  # in which the model is looked at once
                running.begin(jobs)
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for job in jobs:
                job.ticket.fail(error)

    def _listed(self) -> list[Job]:
        """The jobs that wait, in their order."""
        with self._changed:
            return list(self._waiting)

    def _takes(self, job: Job) -> bool:
        """Take a job out of the queue to do it: whether its caller still waits."""
        with self._changed:
            self._waiting.remove(job)
        return job.ticket.set_running_or_notify_cancel()


def _do_here(job: Writing) -> None:
    """Answer a request at once, in the running thread."""
    for drawing in job.drawings.values():
        _do_here(drawing)
    job.ticket.set_running_or_notify_cancel()
    try:
        running = RunningRequests(*job.key)
        running.begin([job])
        while not running.is_idle:
            running.step()
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        job.ticket.fail(error)


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
