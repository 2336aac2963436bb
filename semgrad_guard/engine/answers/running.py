"""Requests to a model, and those that are answered together: they join and leave a model's batch at every step.

Where a model cannot take answers in and out, answers are written one after the other, in whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.batch import ROWS, RunningBatch, of_like_length
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling, require_kind
from semgrad_guard.engine.answers.sentence_evidence import EndedSentences, OpenSentences
from semgrad_guard.engine.answers.writing import Piece, WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.interruption import Ticket
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import AnswerInterruptedError, InputError

R = TypeVar("R")
S = TypeVar("S")

Key = tuple[WritingModel, Objective]
"""What requests have in common that are answered together."""

_READ = 256  # tokens of prompts that are read between two steps of the answers that are being written
_LINGER = 4  # steps that an answer, or its sentences, wait for others to be scored with


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(Generic[R]):
    """Answers to one prompt, one for each of the `options`; their objective is that of later scoring.

    `finish` makes the result of the generations. It runs in the model's thread and within the model's turn, so that a
    score and the model's identity are of one state: the worker knows neither estimators nor drafts. `on_piece` is
    called in the model's thread with the pieces of the first answer and of its thought, and must not wait. Samples of
    the plans in `draws`, which `finish` reads off the evidence, are drawn in the meantime where the answers can be
    joined by others.

    `on_sentences`, in the place of `on_piece`, gets the sentences of the one answer as they end, in the model's thread
    and turn; the answer ends behind the last of them where it returns False. Where answers are written in whole runs it
    is not called.
    """

    prompt: Prompt
    options: tuple[GenerationOptions, ...]
    finish: Callable[[list[Generation]], R]
    objective: Objective = field(default_factory=Objective)
    on_piece: Callable[[Piece], None] | None = None
    on_sentences: Callable[[EndedSentences], bool] | None = None
    draws: tuple[Sampling, ...] = ()

    def __post_init__(self) -> None:
        require_kind("objective", self.objective, Objective)
        if not self.options:
            raise InputError("a request names the options of at least one answer").about("options")
        for one in self.options:
            require_kind("options", one, GenerationOptions)

    def then(self, make: Callable[[R], S]) -> Request[S]:
        """The same request with another result, made of its own in the model's thread."""
        other: Any = replace(self, finish=lambda written: make(self.finish(written)))
        return other


@dataclass(frozen=True, eq=False)
class Work:
    """Work for a model's thread that is no request."""

    work: Callable[[], Any]
    ticket: Ticket[Any] = field(default_factory=Ticket)


@dataclass(eq=False, kw_only=True)
class Writing:
    """A request that is being answered, its answers in `rows` of a batch; `waited` counts the steps since their end.

    `of_several`: its caller submitted others with it. `drawings` are requests for samples, which its scores need, by
    their plan: it is done when they are, and such a one `is_drawing`.
    """

    model: WritingModel
    request: Request[Any]
    of_several: bool = False
    is_drawing: bool = False
    ticket: Ticket[Any] = field(default_factory=Ticket)
    drawings: Mapping[Sampling, Writing] = field(default_factory=dict[Sampling, "Writing"])
    open: OpenSentences | None = None
    rows: list[WrittenAnswer] = field(default_factory=list[WrittenAnswer])
    waited: int = 0

    def draw(self) -> None:
        """Request the samples that its scores need; they end with it."""
        prompt, options = self.wanted[0]
        self.drawings = {
            plan: self.ticket.context.run(
                Writing,
                model=self.model,
                request=Request(
                    prompt=prompt,
                    options=tuple(self.model.fitted(one, prompt) for one in plan.rows(prompt.ids, options)),
                    objective=self.request.objective,  # they share the passes of its answers
                    finish=lambda found: tuple(one.evidence.answer.sample for one in found),
                ),
                is_drawing=True,
            )
            for plan in self.request.draws
        }

    @property
    def key(self) -> Key:
        """What the requests have in common that share a batch with this one."""
        return self.model, self.request.objective

    @property
    def wanted(self) -> list[tuple[Prompt, GenerationOptions]]:
        """Its prompt, with the options of each answer."""
        return [(self.request.prompt, options) for options in self.request.options]

    @property
    def counted(self) -> int:
        """Its answers that are written, or will be: a caller of several decides how many, unless the model limits."""
        if self.is_drawing or (self.of_several and self.model.max_batch is None):
            return 0
        return sum(not row.done for row in self.rows) if self.rows else len(self.request.options)

    def rows_in(self, batch: RunningBatch) -> list[WrittenAnswer]:
        """New rows for a batch to read."""
        self.open = OpenSentences() if self.request.on_sentences else None
        listener = self.request.on_piece if self.open is None else self.open.add
        self.rows = [batch.answer(*one, listener=None if n else listener) for n, one in enumerate(self.wanted)]
        return self.rows

    @property
    def is_written(self) -> bool:
        """Whether all its answers are."""
        return all(row.done for row in self.rows)

    @property
    def done(self) -> bool:
        """Whether all its answers are written, and the samples drawn."""
        return self.is_written and all(drawing.ticket.done() for drawing in self.drawings.values())

    @property
    def error(self) -> BaseException | None:
        """The error that ended one of its answers early."""
        return next((row.error for row in self.rows if row.error), None)


Job = Work | Writing
"""What waits in a model's queue."""


class RunningRequests:
    """The requests of one model and objective that are being answered together."""

    def __init__(self, model: WritingModel, objective: Objective) -> None:
        self.key: Key = model, objective
        self._model = model
        self._batch: RunningBatch = model.running_batch(objective)
        self._writing: list[Writing] = []
        self._reading: list[tuple[Sequence[Writing], Iterator[bool]]] = []  # those that are read together

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not self._writing and not self._reading

    @property
    def is_running(self) -> bool:
        """Whether any answer is being read or written."""
        return bool(self._reading or self._batch.rows)

    @property
    def rows(self) -> int:
        """How many answers are being read or written, without those that count for no limit."""
        return sum(job.counted for job in (*self._writing, *self._being_read))

    @property
    def _being_read(self) -> list[Writing]:
        return [job for group, _ in self._reading for job in group if not job.ticket.done()]

    @property
    def _most(self) -> int:
        return self._model.max_batch or ROWS

    def has_room(self, jobs: Sequence[Writing], *, beside: int) -> bool:
        """Whether all of these can begin together now, next to so many answers."""
        if not self._model.joins or any(job.key != self.key for job in jobs):
            return len(jobs) == 1
        every = [one for job in (*jobs, *self._being_read) for one in job.wanted]
        return beside + sum(job.counted for job in jobs) <= self._most and self._batch.has_room(every)

    def begin(self, jobs: Sequence[Writing]) -> None:
        """Have the prompts of requests read, next to the answers that are being written.

        Requests that cannot join are written by themselves, between two steps of the others.
        """
        joining = [job for job in jobs if self._joins(job.request)]
        for job in jobs:
            if job not in joining:
                self._write_whole(job)
        try:
            self._batch.require_the_same_model()
        except AnswerInterruptedError as error:  # the model was changed: this ends old answers, and no new ones
            self._end([job for job in self._writing if not job.is_written], error)
        groups = of_like_length(joining, lambda job: job.request.prompt)
        self._reading += [(group, self._pieces(group)) for group in groups]

    def _joins(self, request: Request[Any]) -> bool:
        takes = self._model.joins and all(self._batch.takes(request.prompt, one) for one in request.options)
        return takes and (self._model.max_batch is None or len(request.options) <= self._model.max_batch)

    def _write_whole(self, job: Writing) -> None:
        def write() -> None:
            with self._model.turn:
                self._model.require_known([job.request.prompt])
                self._batch.write_whole(job.rows_in(self._batch), scored=not job.is_drawing)

        try:
            job.ticket.run(write)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            job.ticket.fail(error)
        else:
            self._writing.append(job)

    def _pieces(self, jobs: Sequence[Writing]) -> Iterator[bool]:
        """Read the prompts of some requests together, piece by piece: whether they have joined."""
        rows = [row for job in jobs for row in job.rows_in(self._batch)]
        yield from self._batch.join_in_pieces(rows, _READ)

    def _read_on(self) -> None:
        """Read one more piece of a prompt; all short ones, where no other answer waits for its next token."""
        self._reading = [one for one in self._reading if not all(job.ticket.done() for job in one[0])]
        is_first = not self._batch.rows
        while self._reading and self._read_piece() and is_first:
            pass

    def _read_piece(self) -> bool:
        """Read one more piece of the prompts that have waited longest: whether it was their last.

        What reads one prompt ends when its caller leaves; what reads several, only with the process.
        """
        jobs, pieces = self._reading[0]
        try:
            if not (jobs[0].ticket.run(partial(next, pieces)) if len(jobs) == 1 else next(pieces)):
                return False
            self._writing += jobs
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            if len(jobs) == 1:
                self._end(jobs, error)
            else:  # by themselves
                self._reading += [([job], self._pieces([job])) for job in jobs]
        del self._reading[0]
        return True

    def step(self) -> None:
        """One more piece of a prompt, one more token of every answer, and the scores of those that are done.

        The step of one request alone ends within a layer of its stops, that of several between two steps.
        """
        for job in [*self._writing, *self._being_read]:
            try:
                job.ticket.stops.check()
            except AnswerInterruptedError as error:  # its caller has left, or its time is over
                self._end([job], error)
        self._read_on()
        unfinished = [job for job in self._writing if not job.is_written]
        try:
            if len(unfinished) == 1:
                unfinished[0].ticket.run(self._batch.step)
            else:
                self._batch.step()
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            drawings = [job for job in unfinished if job.is_drawing and self._batch.rows]
            self._end(drawings or unfinished, error)  # without samples there may be memory for the answers
        self._hand_over_sentences()
        self._settle()

    def end(self, error: BaseException) -> None:
        """Give every caller this error; the batch is given up with it."""
        for job in (*self._writing, *self._being_read):
            job.ticket.fail(error)

    def _is_time(self, waited: Sequence[int]) -> bool:
        """Whether to score what has waited so many steps.

        Together with others that soon will wait, as long as that is a matter of steps: a backward pass for many reads
        the weights once.
        """
        return bool(waited) and (len(waited) >= max(1, len(self._batch.rows) // 4) or max(waited) > _LINGER)

    def _hand_over_sentences(self) -> None:
        """Score the sentences that have ended."""
        due = [(job, job.open) for job in self._writing if job.open and job.open.is_due and not job.is_written]
        for _, found in due:
            found.waited += 1
        if not self._is_time([found.waited for _, found in due]):
            return
        rows = [job.rows[0] for job, _ in due]
        try:
            with self._model.turn:  # in which the model is looked at once
                self._batch.require_the_same_model()
                ended = self._batch.ended(rows, [found.spans for _, found in due], [found.known for _, found in due])
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end([job for job, _ in due], error)
            return
        for (job, found), sentences in zip(due, ended, strict=True):
            found.hand_over(found.known if sentences is None else len(found.spans))
            try:
                if sentences is not None and not job.ticket.run(partial(self._goes_on, job.request, sentences)):
                    self._batch.end(job.rows[0], sentences.tokens)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._end([job], error)

    def _goes_on(self, request: Request[Any], sentences: EndedSentences) -> bool:
        with self._model.turn:
            return request.on_sentences is None or request.on_sentences(sentences)

    def _settle(self) -> None:
        """Score finished answers."""
        for job in [job for job in self._writing if job.is_written]:
            if error := job.error:
                self._end([job], error)
        done = [job for job in self._writing if job.done]
        for job in done:
            job.waited += 1
        if not self._is_time([job.waited for job in done]):
            return
        # Samples are of one request, and to read them takes long: a step of the others follows on each.
        sampling = [job for job in done if job.drawings]
        for part in filter(None, ([job for job in done if not job.drawings], sampling[:1])):
            self._writing = [job for job in self._writing if job not in part]
            self._deliver(part)

    def _deliver(self, done: Sequence[Writing]) -> None:
        try:
            with self._model.turn:  # in which the model is looked at once
                rows = [row for job in done for row in job.rows]
                known = [job.open and job.open.known for job in done for _ in job.rows]
                most = self._model.max_batch or len(rows)
                parts = (slice(begin, begin + most) for begin in range(0, len(rows), most))
                generations = (one for part in parts for one in self._batch.generations(rows[part], known[part]))
                for job in done:
                    own = [next(generations) for _ in job.rows]
                    for plan, drawing in job.drawings.items():
                        if drawing.ticket.exception() is None:  # else their estimator draws them itself
                            for one in own:
                                one.evidence.scoring.keep(plan, one.evidence.row, drawing.ticket.result())
                    if error := job.error:  # a listener did not take the last piece
                        job.ticket.fail(error)
                    else:
                        job.ticket.settle(partial(job.request.finish, own))
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for job in done:
                job.ticket.fail(error)

    def _end(self, ended: Sequence[Writing], error: BaseException) -> None:
        self._writing = [job for job in self._writing if job not in ended]
        try:
            self._batch.drop(row for job in ended for row in job.rows)
        finally:
            for job in ended:
                job.ticket.fail(error)
