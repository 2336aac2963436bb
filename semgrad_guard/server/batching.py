"""Requests that are written together: at every step some may join and leave; where a model cannot, those that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from semgrad_guard.engine.generation.running_batch import BatchRequest, RunningAnswer
from semgrad_guard.engine.interruption import Stops, current_stop
from semgrad_guard.engine.replay.memory_budget import Memory
from semgrad_guard.errors import AnswerInterruptedError
from semgrad_guard.guard import Draft
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.turns import Turn
from semgrad_guard.server.writing import Assignment, Writer

Batching = Literal["steps", "together", "equal_lengths", "none"]
"""How requests share a model: they join and leave at any step; those that wait and are alike run together, whatever the
lengths of their prompts, or with prompts of equal length; not at all.
"""

ROWS = 32
"""Answers that are written at once."""
MEMORY = Memory(logits=256 << 20, activations=1 << 30, outputs=512 << 20)
"""What a batch of so many answers may hold for their scores."""
_CELLS = 1 << 16  # tokens of a batch, padding counted: what bounds its memory
_READ = 2048  # tokens of prompts that are read between two steps of those that are being written
_LINGER = 4  # steps that an answer which is done waits for others to be scored with


Order = tuple[Turn[list[Draft[Answer]]], Assignment]
"""A request that shall be written, and who waits for it."""


class Batcher(Protocol):
    """Writes requests with one model, in the model's thread.

    Nobody's error is anybody else's: a request that fails is told why, and the others go on. `looks_behind`: a request
    may begin with the one at the head of the queue past others, which cannot.
    """

    @property
    def looks_behind(self) -> bool: ...

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

    def has_room(self, orders: Sequence[Assignment]) -> bool:
        """Whether these can be one run."""
        first, *others = orders
        rows = sum(len(each.options) for each in orders)
        longest = max(len(each.prompt.ids) + each.options[0].max_tokens for each in orders)
        limit = self._writer.model.fixed_positions
        fit = rows <= self._most and rows * longest <= _CELLS and (limit is None or longest <= limit)
        level = self._pads or len({len(each.prompt.ids) for each in orders}) == 1
        return not others or (fit and level and all(_alike(first, each) for each in others))

    def begin(self, orders: Sequence[Order]) -> None:
        """Answer them, one alone under its stops; where several fail, each by itself."""
        assignments = [assignment for _, assignment in orders]
        if self._most == 1:  # nor do the answers to one request share a run
            for turn, assignment in orders:
                turn.settle(lambda own=assignment: self._writer.written_singly(own))
            return
        if len(orders) == 1:
            _write_alone(self._writer, orders[0])
            return
        try:
            drafts = self._writer.written(assignments)
        except BaseException:  # noqa: BLE001 - raised again by that one whose error it is
            drafts = None
        if drafts is None:
            for order in orders:
                _write_alone(self._writer, order)
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

    @property
    def error(self) -> Exception | None:
        """What ended one of its answers before it was written."""
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

        A request that cannot join is written by itself, between two steps of the others.
        """
        joining: list[Order] = []
        for order in orders:
            if self._can_join(order):
                joining.append(order)
            else:
                _write_alone(self._writer, order)
        if joining:
            self._end_what_cannot_go_on()
            self._join(joining)

    def _can_join(self, order: Order) -> bool:
        _, assignment = order
        try:
            fits = len(assignment.options) <= self._most
            return fits and all(self._batch.takes(assignment.prompt, options) for options in assignment.options)
        except Exception:  # noqa: BLE001 - raised again where it is written
            return False

    def _join(self, orders: Sequence[Order]) -> None:
        """Read prompts in one pass, or where that fails one by one.

        The pass that reads one prompt ends when its client goes away; one that reads several, only with the server.
        """
        joined = [_Writing(turn, assignment, turn.context.run(current_stop)) for turn, assignment in orders]
        asked = [
            [BatchRequest(work.prompt, options, work.hearing()) for options in work.options]
            for work in (writing.assignment for writing in joined)
        ]
        every = [one for each in asked for one in each]
        rows: Sequence[RunningAnswer] = ()
        try:
            rows = joined[0].turn.run(lambda: self._batch.join(every)) if len(joined) == 1 else self._batch.join(every)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            if len(joined) == 1:
                joined[0].turn.fail(error)
        if not rows:
            for order in orders if len(orders) > 1 else ():
                self._join([order])
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

    def _end_what_cannot_go_on(self) -> None:
        """Where the model was changed, those that it was writing end, and not those that come now."""
        try:
            self._batch.require_the_same_model()
        except AnswerInterruptedError as error:
            self._end([each for each in self._writing if not each.done], error)

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
            if error := each.error:
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
                if error := each.error:  # somebody who does not hear the end of an answer
                    each.turn.fail(error)
                else:
                    each.turn.settle(lambda each=each, own=own: self._writer.drafts(each.assignment, own))

    def _end(self, ended: Sequence[_Writing], error: BaseException) -> None:
        self._writing = [each for each in self._writing if each not in ended]
        self._batch.drop(row for each in ended for row in each.rows)
        for each in ended:
            each.turn.fail(error)


def _write_alone(writer: Writer, order: Order) -> None:
    """Write a request in a run of its own, under its stops."""
    turn, assignment = order
    turn.settle(lambda: writer.written([assignment])[0])


def _alike(first: Assignment, other: Assignment) -> bool:
    """Whether two requests can be written in one run: the same options and form, and nobody listens."""
    one, two = first.request, other.request
    same = one.options == two.options and one.form == two.form and first.options[0] == other.options[0]
    return same and one.options.seed is None and one.heard is None and two.heard is None
