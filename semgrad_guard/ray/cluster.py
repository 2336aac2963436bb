"""A Ray cluster for as long as it is needed: one that runs already, or one in this process.

Its workers load a model once and are handed one batch after the other; one that dies loses nothing. A batch is handed
out when a worker is free, so no more than one batch a worker is on its way, however many there are. A worker's result
is whole or missing: a batch whose worker died is handed to another one, and no batch is returned twice.

Why: docs/adr/0160-batches-go-to-workers.md
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import ClusterError, MissingExtraError, SemGradGuardError
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.run import Batch
from semgrad_guard.files import first_line
from semgrad_guard.loading import ModelSource

_SECONDS = 10
"""A machine that is there answers within these."""


def library() -> Any:
    """The package `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", extra="ray") from error
    return ray


@contextmanager
def cluster(address: str = "local", *, verbose: bool = False, **options: Any) -> Generator[Any]:
    """The package `ray`, connected until the end; one that is connected already stays so.

    Args:
        address: `local` (one in this process), `auto` (the one on this machine), `HOST:PORT` or `ray://HOST:PORT`.
        verbose: whether workers' output is shown here.
        options: further ones of `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: there is no cluster at the address.
    """
    # Ray reports its use over the network, and starts pages for a browser, unless this is switched off.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = library()
    if ray.is_initialized():
        yield ray
        return
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # where nothing listens, Ray would try again for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=verbose, logging_level="ERROR", **local, **options)
        finally:  # Ray takes SIGTERM for itself
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
    except (OSError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"There is no Ray cluster at {address!r}: {first_line(error)}. Start one (ray start --head), set "
            "RAY_AUTH_MODE=token where it asks for a token, or leave the address away: a cluster of one then starts in "
            "this process."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def workers_for(ray: Any, wanted: int | None, *, on_gpu: bool) -> int:
    """How many workers: as many as wanted, or one a GPU; where the model is on CPUs, one a machine.

    Raises:
        ClusterError: the model needs a GPU and the cluster has none.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if on_gpu and not gpus:
        raise ClusterError("The cluster has no GPU. Add a machine that has one, or leave --device cuda away.")
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    return wanted or (gpus if on_gpu else max(1, len(alive)))


def cpus_each(ray: Any, workers: int) -> int:
    """The share of the cluster's CPUs that a worker takes; no more than the smallest machine has."""
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    usable = [count for count in counts if count]
    share = math.floor(sum(usable) / workers)
    return max(1, min([share, *usable]))


R = TypeVar("R")
Recipe = Callable[[LanguageModel], Callable[[Sequence[Question], int], R]]
"""Makes a function of a model, which answers a batch, given the index of its first question. It pickles."""

_DEATHS = 10
"""So many workers may die over one batch, or in a row while they load; then it is the batch or the model that kills."""


@dataclass(frozen=True)
class Job(Generic[R]):
    """The workers' job: the model that they load, and the recipe for its use."""

    source: ModelSource
    recipe: Recipe[R]


class Worker(Generic[R]):
    """The actor in a process of its own."""

    def __init__(self, job: Job[R], threads: int) -> None:
        self._job, self._threads = job, threads
        self._answer: Callable[[Sequence[Question], int], R] | None = None

    def load(self) -> None:
        """Load the model; nothing is handed out before."""
        import torch

        torch.set_num_threads(self._threads)
        self._answer = self._job.recipe(self._job.source.load())

    def answer(self, rows: Sequence[Question], start: int) -> R:
        """The job's result for a batch."""
        if self._answer is None:
            raise RuntimeError("the worker has no model yet")
        return self._answer(rows, start)


def spread(ray: Any, job: Job[R], batches: Iterable[Batch], *, workers: int | None = None) -> Iterator[R]:
    """The job's result for each batch, as soon as it is there, in any order.

    Args:
        ray: the package, connected.
        job: the work.
        batches: read as workers become free.
        workers: how many; by default one a GPU, or one a machine where the model is on CPUs. They share the CPUs.

    Raises:
        ClusterError: workers keep dying.
        SemGradGuardError: whatever a worker raises.
    """
    count = workers_for(ray, workers, on_gpu=job.source.on_gpu)
    cpus = cpus_each(ray, count)
    stated = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(cpus, int(stated)) if stated.isdigit() else cpus
    kind = ray.remote(num_cpus=cpus, num_gpus=int(job.source.on_gpu), max_restarts=0, max_task_retries=0)(Worker)
    pool = _Pool[R](ray, lambda: kind.remote(job, threads), count, iter(batches))
    try:
        yield from pool.results()
    finally:
        pool.close()


@dataclass(frozen=True)
class _Turn:
    """A worker's current work: a batch, or None while it loads."""

    worker: Any
    batch: Batch | None


@dataclass
class _Pool(Generic[R]):
    """Workers, idle and busy, and the batches that they have not done yet."""

    ray: Any
    start: Callable[[], Any]
    most: int
    batches: Iterator[Batch]
    again: deque[Batch] = field(default_factory=deque[Batch])
    idle: list[Any] = field(default_factory=list[Any])
    busy: dict[Any, _Turn] = field(default_factory=dict[Any, _Turn])
    deaths: Counter[int | None] = field(default_factory=Counter[int | None])

    def results(self) -> Iterator[R]:
        """The results of the batches."""
        while True:
            # A batch to each idle worker; new ones as long as there are batches and fewer workers than there may be.
            while (batch := self.again.popleft() if self.again else next(self.batches, None)) is not None:
                if self.idle:
                    worker = self.idle.pop()
                    self.busy[worker.answer.remote(batch.rows, batch.start)] = _Turn(worker, batch)
                    continue
                self.again.appendleft(batch)
                if len(self.busy) == self.most:
                    break
                worker = self.start()
                self.busy[worker.load.remote()] = _Turn(worker, None)
            if not self.busy:
                return
            (done,), _ = self.ray.wait(list(self.busy), num_returns=1)
            yield from self._take(done)

    def close(self) -> None:
        """End all workers."""
        for worker in (*self.idle, *(turn.worker for turn in self.busy.values())):
            self.ray.kill(worker)

    def _take(self, done: Any) -> Iterator[R]:
        """The result of a turn, if it has one; the worker is idle again, or dead."""
        turn = self.busy.pop(done)
        batch = turn.batch
        try:
            found = self.ray.get(done)
        except self.ray.exceptions.RayActorError as error:  # it died, and its batch is for another one
            where, what = None, "while they loaded the model"
            if batch is not None:
                where, what = batch.start, f"over the batch from row {batch.start + 1} on"
                self.again.append(batch)
            self.deaths[where] += 1
            if self.deaths[where] >= _DEATHS:
                raise ClusterError(
                    f"{_DEATHS} workers died {what}: {first_line(error)}. If memory is short, take fewer --workers or "
                    "a smaller --batch-size. What is done is kept."
                ) from error
            return
        except self.ray.exceptions.RayTaskError as error:
            self.ray.kill(turn.worker)
            cause = getattr(error, "cause", None)  # our own error, or else Ray's, with the worker's traceback
            raise (cause if isinstance(cause, SemGradGuardError) else error) from error
        self.idle.append(turn.worker)
        if batch is None:
            self.deaths[None] = 0
        else:
            yield found
