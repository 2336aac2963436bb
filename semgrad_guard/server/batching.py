"""Requests that are written together: at every step some may join and leave; where a model cannot, those that wait."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Literal, Protocol

from semgrad_guard.engine.generation.running_batch import Asked, RunningAnswer
from semgrad_guard.engine.interruption import Stops, current_stop
from semgrad_guard.errors import AnswerInterruptedError
from semgrad_guard.guard import Draft
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.turns import Turn
from semgrad_guard.server.writing import AnswerRequest, Assignment, Writer

Batching = Literal["steps", "together", "none"]
"""How requests share a model: they join and leave at any step; those that wait and are alike run together; not."""

ROWS = 32
"""Answers that are written at once."""
_CELLS = 1 << 16  # tokens of a batch, padding counted: what bounds its memory
_READ = 2048  # tokens of prompts that are read between two steps of those that are being written
_LINGER = 4  # steps that an answer which is done waits for others to be scored with


Order = tuple[Turn[list[Draft[Answer]]], Assignment]
"""A request that shall be written, and who waits for it."""


class Batcher(Protocol):
    """Writes requests with one model, in the model's thread.

    Nobody's error is anybody else's: a request that fails is told why, and the others go on.
    """

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        ...

    def has_room(self, orders: Sequence[Assignment]) -> bool:
        """Whether these can begin now, all of them; where nothing is being written, one always can."""
        ...

    def begin(self, orders: Sequence[Order]) -> None:
        """Begin to write some requests."""
        ...

    def step(self) -> None:
        """Go on with what is being written."""
        ...


def batcher_of(writer: Writer) -> tuple[Batching, Batcher]:
    """How requests share a model, as far as it can, and what does it. The first call makes the model's self-check."""
    if writer.model.joins:
        return "steps", RunningRequests(writer)
    together = writer.model.pads
    return "together" if together else "none", WholeRuns(writer, rows=ROWS if together else 1)


class WholeRuns:
    """Each run of the model answers one request, or several that are alike, from the first token to the last."""

    is_idle = True

    def __init__(self, writer: Writer, *, rows: int) -> None:
        self._writer, self._most = writer, rows

    def has_room(self, orders: Sequence[Assignment]) -> bool:
        """Whether these can be one run."""
        first, *others = orders
        rows = sum(len(each.options) for each in orders)
        return not others or (rows <= self._most and all(_alike(first.request, each.request) for each in others))

    def begin(self, orders: Sequence[Order]) -> None:
        """Answer them, one alone under its stops."""
        assignments = [assignment for _, assignment in orders]
        if len(orders) == 1:
            orders[0][0].settle(lambda: self._writer.written(assignments)[0])
            return
        try:
            drafts = self._writer.written(assignments)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            for turn, _ in orders:
                turn.fail(error)
            return
        for (turn, _), own in zip(orders, drafts, strict=True):
            turn.settle(lambda own=own: own)

    def step(self) -> None:
        """Nothing is left to go on with."""


@dataclass(eq=False)
class _Writing:
    """A request that is being written."""

    turn: Turn[list[Draft[Answer]]]
    assignment: Assignment
    stops: Stops
    rows: list[RunningAnswer] = field(default_factory=list[RunningAnswer])
    waited: int = 0

    @property
    def done(self) -> bool:
        """Whether all its answers are."""
        return all(row.done for row in self.rows)


class RunningRequests:
    """Requests join a running batch at any step, and leave it when they are done."""

    def __init__(self, writer: Writer, *, rows: int = ROWS) -> None:
        self._writer, self._most = writer, rows
        self._batch = writer.model.running_batch(writer.estimator.objective)
        self._writing: list[_Writing] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    def has_room(self, orders: Sequence[Assignment]) -> bool:
        """Whether these can join now, all of them."""
        new = [(each.prompt, options) for each in orders for options in each.options]
        if self.is_idle and len(orders) == 1:
            return True
        read = sum(len(each.prompt.ids) for each in orders)
        rows = len(self._batch.rows) + len(new)
        return rows <= self._most and read <= _READ and self._batch.has_room(new, cells=_CELLS)

    def begin(self, orders: Sequence[Order]) -> None:
        """Read the prompts of some requests, beside those that are being written.

        The pass that reads one prompt ends when its client goes away; one that reads several ends by itself.
        """
        joined = [_Writing(turn, assignment, turn.context.run(current_stop)) for turn, assignment in orders]
        asked = [
            [Asked(each.assignment.prompt, options, each.assignment.hearing()) for options in each.assignment.options]
            for each in joined
        ]
        every = [one for each in asked for one in each]
        try:
            alone = joined[0].turn.context if len(joined) == 1 else Context()
            rows = alone.run(self._batch.join, every)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            for each in joined:
                each.turn.fail(error)
            return
        left = iter(rows)
        for each, own in zip(joined, asked, strict=True):
            each.rows = [next(left) for _ in own]
        self._writing += joined

    def step(self) -> None:
        """One more token of every answer, and the scores of those that are done."""
        self._let_go()
        try:
            self._batch.step()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._end([each for each in self._writing if not each.done], error)
        self._settle()

    def _let_go(self) -> None:
        """Requests that nobody waits for any more, or that are out of time, give up their rows."""
        for each in list(self._writing):
            try:
                each.stops.check()
            except AnswerInterruptedError as error:
                self._end([each], error)

    def _settle(self) -> None:
        """Score answers that are done: together with others that soon will be, as long as that is a matter of steps."""
        for each in [each for each in self._writing if each.done]:
            if error := next((row.error for row in each.rows if row.error), None):
                self._end([each], error)
        done = [each for each in self._writing if each.done]
        for each in done:
            each.waited += 1
        enough = max(1, len(self._batch.rows) // 4)
        if done and (not self._batch.rows or len(done) >= enough or max(each.waited for each in done) > _LINGER):
            self._writing = [each for each in self._writing if not each.done]
            self._deliver(done)

    def _deliver(self, done: Sequence[_Writing]) -> None:
        try:
            generations = iter(self._batch.generations([row for each in done for row in each.rows]))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            for each in done:
                each.turn.fail(error)
            return
        with self._writer.model.turn:  # in which the model is looked at once
            for each in done:
                own = [next(generations) for _ in each.rows]
                each.turn.settle(lambda each=each, own=own: self._writer.drafts(each.assignment, own))

    def _end(self, ended: Sequence[_Writing], error: BaseException) -> None:
        self._writing = [each for each in self._writing if each not in ended]
        self._batch.drop(row for each in ended for row in each.rows)
        for each in ended:
            each.turn.fail(error)


def _alike(first: AnswerRequest, other: AnswerRequest) -> bool:
    """Whether two requests can be written in one run: the same options and form, and nobody listens."""
    same = first.options == other.options and first.form == other.form
    return same and first.options.seed is None and first.heard is None and other.heard is None
