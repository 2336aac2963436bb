"""The requests that are answered together: they join and leave a model's batch at every step.

Where a model cannot take answers in and out, answers are written one after the other, in whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.answers.request import Job, Request
from semgrad_guard.engine.answers.sentences import EndedSentences, OpenSentences
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.memory import is_out_of_memory
from semgrad_guard.errors import AnswerInterruptedError

Batching = Literal["steps", "none"]
"""How requests share a model: they join and leave at any step; not at all."""
Key = tuple[WritingModel, Objective, Batching]
"""What requests have in common that are answered together."""

ROWS = 8
"""Answers that are written at once, unless `LanguageModel.max_batch` is another number."""
_READ = 256  # tokens of prompts that are read between two steps of the answers that are being written
_LINGER = 4  # steps that an answer, or its sentences, wait for others to be scored with
_LOOK = 16  # steps from one look at the model to the next: a look costs some twentieth of a step


def is_time(waited: Sequence[int], beside: int) -> bool:
    """Whether to score what has waited so many steps, next to so many answers that are being written.

    Together with others that soon will wait, as long as that is a matter of steps.
    """
    return bool(waited) and (len(waited) >= max(1, beside // 4) or max(waited) > _LINGER)


def is_time_to_score(due: Sequence[OpenSentences], beside: int) -> bool:
    """As `is_time`, for sentences that have ended: the first of an answer is wanted soon, later ones can wait longer.

    A backward pass for many reads the weights once.
    """
    later = [one.waited for one in due if one.known]
    first = [one.waited for one in due if not one.known]
    return is_time(first, beside) or (bool(due) and (len(due) >= beside or max(later, default=0) > 2 * _LINGER))


@dataclass(eq=False, kw_only=True)
class Writing(Job):
    """A request that is being answered, its answers in rows of the batch; `waited` counts the steps since its end.
    `of_several`: its caller submitted others with it. `draws` are the options of the samples that are drawn for the
    scores of its answers, by their plan, and `samples` the rows of these.
    """

    model: WritingModel
    request: Request[Any]
    of_several: bool = False
    open: OpenSentences | None = None
    draws: Mapping[Sampling, Sequence[GenerationOptions]] = field(
        default_factory=dict[Sampling, Sequence[GenerationOptions]]
    )
    answers: list[WrittenAnswer] = field(default_factory=list[WrittenAnswer])
    samples: dict[Sampling, list[WrittenAnswer]] = field(default_factory=dict[Sampling, list[WrittenAnswer]])
    waited: int = 0

    @property
    def wanted(self) -> list[tuple[Prompt, GenerationOptions]]:
        """Its prompt, with the options of each answer."""
        return [(self.request.prompt, options) for options in self.request.options]

    @property
    def extra_rows(self) -> int:
        """Its answers that count for no limit: a caller of several decides how many, unless the model limits them."""
        return len(self.request.options) if self.of_several and self.model.max_batch is None else 0

    def rows_in(self, batch: RunningBatch) -> list[WrittenAnswer]:
        """New rows of its answers and samples, for a batch to read."""
        prompt, options = self.request.prompt, self.request.options
        self.open = OpenSentences() if self.request.on_sentences else None
        listener = self.request.on_piece if self.open is None else self.open.add
        self.answers = [batch.answer(prompt, one, listener=None if n else listener) for n, one in enumerate(options)]
        self.samples = {
            plan: [batch.answer(prompt, one, scored=False) for one in drawn] for plan, drawn in self.draws.items()
        }
        return self.rows

    @property
    def rows(self) -> list[WrittenAnswer]:
        """The rows of its answers, and of the samples for their scores."""
        return [*self.answers, *(row for rows in self.samples.values() for row in rows)]

    @property
    def done(self) -> bool:
        """Whether all its answers are, and the samples."""
        return all(row.done for row in self.rows)

    @property
    def error(self) -> BaseException | None:
        """The error that ended one of its answers early."""
        return next((row.error for row in self.answers if row.error), None)


class RunningRequests:
    """The requests of one model and objective that are being answered together."""

    def __init__(self, model: WritingModel, objective: Objective, batching: Batching) -> None:
        self.key: Key = model, objective, batching
        self._model, self._most, self._joins = model, model.max_batch or ROWS, batching == "steps"
        self._batch: RunningBatch = model.running_batch(objective)
        self._writing: list[Writing] = []
        self._reading: list[tuple[Writing, Iterator[bool]]] = []
        self._steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read or written."""
        return not self._writing and not self._reading

    @property
    def rows(self) -> int:
        """How many answers are being written, or will be, without samples and those that count for no limit."""
        begin = sum(len(one.request.options) for one, _ in self._reading if not one.extra_rows)
        writing = [row for one in self._writing if not one.extra_rows for row in one.answers]
        return begin + sum(not row.done for row in writing)

    def has_room(self, jobs: Sequence[Writing], *, beside: int) -> bool:
        """Whether all of these can begin together now, besides so many answers in other batches."""
        if any((job.model, job.request.objective) != self.key[:2] for job in jobs):
            return False
        first = self.is_idle and not beside  # no one else waits for the pass
        if len(jobs) == 1 and (first or not self._joins):
            return True
        if not self._joins:
            return False
        new = [one for job in jobs for one in job.wanted]
        reading = [one for job, _ in self._reading for one in job.wanted]
        lengths = [len(job.request.prompt.ids) for job in jobs]
        read = sum(length for length in lengths if length <= _READ)  # longer prompts are read in pieces
        extra = sum(job.extra_rows for job in jobs)
        rows = beside + self.rows + len(new) - extra
        reads = read <= _READ * (1 + first) or (first and extra == len(new))
        return rows <= self._most and reads and self._batch.has_room([*reading, *new])

    def begin(self, jobs: Sequence[Writing]) -> None:
        """Read the prompts of requests, next to those that are being written; long ones in pieces.

        Requests that cannot join are written by themselves, between two steps of the others.
        """
        joining = [job for job in jobs if self._can_join(job.request)]
        for job in jobs:
            if job not in joining:
                self._begin([job], self._write_whole)
        if not joining:
            return
        try:
            self._batch.require_the_same_model()
        except AnswerInterruptedError as error:  # the model was changed: this ends old answers, and no new ones
            self._end([job for job in self._writing if not job.done], error)
        beside = len(self._batch.rows) + sum(len(job.request.options) for job in joining)
        for job in joining:
            job.draws = self._draws_of(job.request, beside)
            beside += sum(map(len, job.draws.values()))
        long = [job for job in joining if len(job.request.prompt.ids) > _READ]
        self._reading += [(job, self._batch.join_in_pieces(job.rows_in(self._batch), _READ)) for job in long]
        if at_once := [job for job in joining if job not in long]:
            self._begin(at_once, self._batch.join)

    def _can_join(self, request: Request[Any]) -> bool:
        if not self._joins or len(request.options) > self._most:
            return False
        try:
            self._model.require_known([request.prompt])
            return all(self._batch.takes(request.prompt, options) for options in request.options)
        except Exception:  # noqa: BLE001 - raised again where it is written
            return False

    def _draws_of(self, request: Request[Any], beside: int) -> Mapping[Sampling, Sequence[GenerationOptions]]:
        """The samples that are drawn next to so many rows; an estimator draws those itself that have no room here."""
        prompt, options = request.prompt, request.options[0]
        draws = {
            plan: [self._model.fitted(one, prompt) for one in plan.rows(prompt.ids, options)] for plan in request.draws
        }
        drawn = [(prompt, one) for own in draws.values() for one in own]
        fits = len(drawn) + beside <= 2 * self._most and all(self._batch.takes(*one) for one in drawn)
        return draws if drawn and fits and self._batch.has_room(drawn, scored=False, budgets=2) else {}

    def _write_whole(self, rows: Sequence[WrittenAnswer]) -> None:
        with self._model.turn:
            self._model.require_known([row.prompt for row in rows])
            for row in rows:
                self._model.write_whole(row, self.key[1])

    def _begin(self, begun: Sequence[Writing], read: Callable[[Sequence[WrittenAnswer]], None]) -> None:
        """Read prompts together, or where that fails one by one.

        What reads one prompt ends when its caller leaves; what reads several, only with the process.
        """
        alone = len(begun) == 1

        def work() -> None:
            read([row for job in begun for row in job.rows_in(self._batch)])

        try:
            if alone:
                begun[0].run(work)
            else:
                work()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            if alone:
                self._failed(begun[0], error)
            else:
                for job in begun:
                    self._begin([job], read)
            return
        self._writing += begun

    def _failed(self, job: Writing, error: BaseException) -> None:
        """A prompt cannot be read: its caller gets the error, unless there is room without the samples."""
        if not job.draws or not is_out_of_memory(error):
            self._end([job], error)
            return
        self._reading = [(one, pieces) for one, pieces in self._reading if one is not job]
        job.draws = {}
        self._begin([job], self._batch.join)

    def _read_on(self) -> None:
        """Read one more piece of the prompt that has waited longest."""
        for number, (job, pieces) in enumerate(list(self._reading)):
            try:
                job.stops.check()
                if number == 0 and job.run(partial(next, pieces)):
                    del self._reading[0]
                    self._writing.append(job)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._failed(job, error)

    def step(self) -> None:
        """One more piece of a prompt, one more token of every answer, and the scores of those that are done.

        The step of one request alone ends within a layer of its stops, that of several between two steps.
        """
        self._read_on()
        for job in list(self._writing):
            try:
                job.stops.check()
            except AnswerInterruptedError as error:  # its caller has left, or its time is over
                self._end([job], error)
        self._steps += 1
        unfinished = [job for job in self._writing if not job.done]
        try:
            step = partial(self._batch.step, look=self._steps % _LOOK == 0)
            if len(self._writing) == 1:
                self._writing[0].run(step)
            else:
                step()
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end(unfinished, error)
        self._hand_over_sentences()
        self._settle()

    def end(self, error: BaseException) -> None:
        """Give every caller this error; the batch is given up with it."""
        for job in (*self._writing, *(one for one, _ in self._reading)):
            job.fail(error)

    def _hand_over_sentences(self) -> None:
        """Score the sentences that have ended, together with those of others that soon will have (as `_settle`)."""
        waiting = ((one, one.open) for one in self._writing if one.open and one.open.is_due)
        due = [(job, found) for job, found in waiting if not job.answers[0].done]
        for _, found in due:
            found.waited += 1
        if not is_time_to_score([found for _, found in due], len(self._batch.rows)):
            return
        rows = [job.answers[0] for job, _ in due]
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
                if sentences is not None and not job.run(partial(self._goes_on, job.request, sentences)):
                    self._batch.end(job.answers[0], sentences.tokens)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._end([job], error)

    def _goes_on(self, request: Request[Any], sentences: EndedSentences) -> bool:
        with self._model.turn:
            return request.on_sentences is None or request.on_sentences(sentences)

    def _settle(self) -> None:
        """Score finished answers: together with others that soon will be, as long as that is a matter of steps."""
        for job in [job for job in self._writing if job.done]:
            if error := job.error:
                self._end([job], error)
        done = [job for job in self._writing if job.done]
        for job in done:
            job.waited += 1
        if is_time([job.waited for job in done], len(self._batch.rows)):
            drawn = next((job for job in done if job.samples), None)
            done = [job for job in done if not job.samples] + ([drawn] if drawn else [])
            self._writing = [job for job in self._writing if job not in done]
            self._deliver(done)

    def _deliver(self, done: Sequence[Writing]) -> None:
        try:
            with self._model.turn:  # in which the model is looked at once
                rows = [row for job in done for row in job.answers]
                known = [job.open and job.open.known for job in done for _ in job.answers]
                most = self._model.max_batch or len(rows)
                parts = (slice(begin, begin + most) for begin in range(0, len(rows), most))
                generations = (one for part in parts for one in self._batch.generations(rows[part], known[part]))
                for job in done:
                    own = [next(generations) for _ in job.answers]
                    for plan, drawn in job.samples.items():
                        if not any(row.error for row in drawn):  # else their estimator draws them itself
                            samples = self._batch.samples(drawn)
                            for one in own:
                                one.scoring.keep(plan, one.row, samples)
                    if error := job.error:  # a listener did not take the last piece
                        job.fail(error)
                    else:
                        job.settle(partial(job.request.finish, own))
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for job in done:
                job.fail(error)

    def _end(self, ended: Sequence[Writing], error: BaseException) -> None:
        self._writing = [job for job in self._writing if job not in ended]
        self._reading = [(one, pieces) for one, pieces in self._reading if one not in ended]
        try:
            self._batch.drop(row for job in ended for row in job.rows)
        finally:
            for job in ended:
                job.fail(error)
