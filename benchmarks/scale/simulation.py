"""A discrete-event model of the server: clients, replicas, queues, running batches, scores (SimPy).

A replica does what `semgrad_guard.server` does. One thread owns the model. It takes requests from its queue as long as
there is room, reads their prompts, writes one more token of every answer, and scores those that are done together with
others that soon will be. So a long score holds up a decode step, as it does there.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import Any

import simpy
from services import Question, Services

ROWS, READ, LINGER = 32, 2048, 4
"""As in `semgrad_guard.server.batching`: answers at once, tokens read between two steps, steps a done one waits."""

Steps = Generator[simpy.Event, Any, Any]


@dataclass(eq=False)
class Request:
    """A question on its way; times are in seconds since the beginning."""

    question: Question
    sent: float
    answered: simpy.Event
    began: float = 0.0
    written: int = 0
    waited: int = 0

    @property
    def done(self) -> bool:
        """Whether its answer is written."""
        return self.written >= self.question.answer


@dataclass(frozen=True)
class Answered:
    """What became of a request: when it was sent, when its prompt was read, when its verdict was there."""

    question: Question
    sent: float
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """From sending it to its verdict."""
        return self.ended - self.sent


@dataclass(frozen=True)
class Server:
    """What is simulated: how long things take, and how many replicas there are.

    `around` is what a request takes outside the model's thread (HTTP, JSON, two threads that wake each other);
    `slowdown` how much longer the thread takes for everything than it does where nothing else runs in its process.
    """

    services: Services
    around: float = 0.0
    slowdown: float = 1.0
    replicas: int = 1
    rows: int = ROWS


@dataclass
class Run:
    """What a simulation has seen."""

    answered: list[Answered] = field(default_factory=list[Answered])
    busy: list[float] = field(default_factory=list[float])
    """Seconds that each replica's thread was at work."""
    ended: float = 0.0

    @property
    def answers_a_second(self) -> float:
        """Over the whole run."""
        return len(self.answered) / self.ended

    @property
    def tokens_a_second(self) -> float:
        """Of the answers, over the whole run."""
        return sum(each.question.answer for each in self.answered) / self.ended

    @property
    def utilisation(self) -> float:
        """The share of the time in which a replica's thread is at work, on average."""
        return statistics.fmean(self.busy) / self.ended

    def percentile(self, share: float) -> float:
        """Seconds that this share of the requests took at most."""
        ordered = sorted(each.seconds for each in self.answered)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def after(self, start: float) -> Run:
        """Without what was sent before, so that an empty beginning does not count."""
        late = [each for each in self.answered if each.sent >= start]
        return Run(late, self.busy, self.ended)


class _Replica:
    """One process with a model: its queue, its running batch, its thread."""

    def __init__(self, env: simpy.Environment, server: Server) -> None:
        self._env, self._server = env, server
        self._waiting: deque[Request] = deque()
        self._batch: list[Request] = []  # being written
        self._done: list[Request] = []  # written, and not scored
        self._woken = env.event()
        self.busy = 0.0
        env.process(self._run())

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self._waiting) + len(self._batch) + len(self._done)

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""
        self._waiting.append(request)
        if not self._woken.triggered:
            self._woken.succeed()

    def _run(self) -> Steps:
        while True:
            if not self.load:
                self._woken = self._env.event()
                yield self._woken
            if joining := list(self._joining()):
                yield from self._works(self._server.services.join([each.question.prompt for each in joining]))
                self._batch += joining
                self._write(joining)
            if self._batch:
                width = statistics.fmean(each.question.prompt + each.written for each in self._batch)
                yield from self._works(self._server.services.step(len(self._batch), width))
                self._write(list(self._batch))
            yield from self._settle()

    def _joining(self) -> Iterator[Request]:
        """What leaves the queue now."""
        free, read = self._server.rows - len(self._batch), 0
        while self._waiting and free:
            tokens = self._waiting[0].question.prompt
            if read and read + tokens > READ:
                break
            free, read = free - 1, read + tokens
            request = self._waiting.popleft()
            request.began = self._env.now
            yield request

    def _write(self, rows: Iterable[Request]) -> None:
        for each in rows:
            each.written += 1
        self._done += [each for each in self._batch if each.done]
        self._batch = [each for each in self._batch if not each.done]

    def _settle(self) -> Steps:
        """Score what is done, once there is enough of it, or it has waited for some steps."""
        for each in self._done:
            each.waited += 1
        enough = max(1, len(self._batch) // 4)
        late = any(each.waited > LINGER for each in self._done)
        if self._done and (not self._batch or len(self._done) >= enough or late):
            done, self._done = self._done, []
            yield from self._works(self._server.services.score([each.question for each in done]))
            for each in done:
                each.answered.succeed()

    def _works(self, seconds: float) -> Steps:
        seconds *= self._server.slowdown
        self.busy += seconds
        yield self._env.timeout(seconds)


class _System:
    """Replicas, and whoever hands requests to them."""

    def __init__(self, server: Server, random: Random) -> None:
        self.env, self.run, self._around, self._random = simpy.Environment(), Run(), server.around, random
        self.replicas = [_Replica(self.env, server) for _ in range(server.replicas)]

    def ask(self, question: Question) -> Steps:
        """One request from its sending to its verdict."""
        request = Request(question, self.env.now, self.env.event())
        yield self.env.timeout(self._around / 2)
        self._chosen().submit(request)
        yield request.answered
        yield self.env.timeout(self._around / 2)
        self.run.answered.append(Answered(question, request.sent, request.began, self.env.now))

    def _chosen(self) -> _Replica:
        """The less loaded one of two that are drawn, which is how Ray Serve chooses.

        https://docs.ray.io/en/latest/serve/architecture.html
        """
        if len(self.replicas) == 1:
            return self.replicas[0]
        return min(self._random.sample(self.replicas, 2), key=lambda each: each.load)

    def finished(self, until: simpy.Event) -> Run:
        """What was seen, once `until` has happened."""
        self.env.run(until=until)
        self.run.busy, self.run.ended = [each.busy for each in self.replicas], self.env.now
        return self.run


def closed(server: Server, questions: Sequence[Question], *, clients: int, each: int, seed: int = 0) -> Run:
    """So many clients, of which each sends `each` questions, one after the other (`benchmarks/serving.py`)."""
    system = _System(server, Random(seed))
    asked = islice(cycle(questions), clients * each)

    def client() -> Steps:
        for _ in range(each):
            yield from system.ask(next(asked))

    return system.finished(system.env.all_of([system.env.process(client()) for _ in range(clients)]))


def opened(server: Server, draw: Callable[[Random], Question], *, rate: float, count: int, seed: int = 0) -> Run:
    """`count` requests that arrive at random, `rate` a second, whatever became of those before (Poisson)."""
    random = Random(seed)
    system = _System(server, random)

    def arrivals() -> Steps:
        sent: list[simpy.Event] = []
        for _ in range(count):
            yield system.env.timeout(random.expovariate(rate))
            sent.append(system.env.process(system.ask(draw(random))))
        yield system.env.all_of(sent)

    return system.finished(system.env.process(arrivals()))
