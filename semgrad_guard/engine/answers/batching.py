"""The requests that are answered together: they join and leave a model's batch at every step.

Where a model cannot take answers in and out, requests are written in whole runs, from the first token to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.answers.request import Job, Request
from semgrad_guard.engine.answers.sentences import EndedSentences, OpenSentences
from semgrad_guard.engine.answers.writing import BatchRequest, WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import is_out_of_memory
from semgrad_guard.errors import AnswerInterruptedError

Batching = Literal["steps", "equal_lengths", "none"]
"""How requests share a model: they join and leave at any step; those that wait run together, with prompts of equal
length; not at all.
"""
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


@dataclass(eq=False)
class _Writing:
    """A request that is being written, its answers in rows of the batch; `waited` counts the steps since its end.

    `draws` are the options of the samples that are drawn for the scores of its answers, by their plan, and `samples`
    the rows of these.
    """

    job: Job
    request: Request[Any]
    open: OpenSentences | None = None
    draws: Mapping[Sampling, Sequence[GenerationOptions]] = field(
        default_factory=dict[Sampling, Sequence[GenerationOptions]]
    )
    answers: list[WrittenAnswer] = field(default_factory=list[WrittenAnswer])
    samples: dict[Sampling, list[WrittenAnswer]] = field(default_factory=dict[Sampling, list[WrittenAnswer]])
    waited: int = 0

    @classmethod
    def of(cls, job: Job) -> _Writing:
        """That of a job that asks for answers."""
        _, request = job.submitted
        return cls(job, request, OpenSentences() if request.on_sentences else None)

    @property
    def requests(self) -> list[BatchRequest]:
        """Its answers and samples as requests to the batch."""
        prompt, listener = self.request.prompt, self.request.on_piece if self.open is None else self.open.add
        drawn = [options for draw in self.draws.values() for options in draw]
        return [
            *(BatchRequest(prompt, one, None if n else listener) for n, one in enumerate(self.request.options)),
            *(BatchRequest(prompt, one, scored=False) for one in drawn),
        ]

    def begin(self, rows: Iterator[WrittenAnswer]) -> None:
        """Take the rows that were made of its requests."""
        self.answers = [next(rows) for _ in self.request.options]
        self.samples = {plan: [next(rows) for _ in options] for plan, options in self.draws.items()}

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
        self._model, self._most, self._batching = model, model.max_batch or ROWS, batching
        self._batch = model.running_batch(objective)
        self._writing: list[_Writing] = []
        self._reading: list[tuple[_Writing, Iterator[list[WrittenAnswer] | None]]] = []
        self._steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read or written."""
        return not self._writing and not self._reading

    @property
    def looks_behind(self) -> bool:
        """Whether a request may begin with the first of the queue, before others between them, which cannot."""
        return self._batching != "steps"

    @property
    def rows(self) -> int:
        """How many answers are being written, or will be, without samples and those that count for no limit."""
        begin = sum(len(one.request.options) for one, _ in self._reading if not one.job.extra_rows)
        writing = [row for one in self._writing if not one.job.extra_rows for row in one.answers]
        return begin + sum(not row.done for row in writing)

    def has_room(self, jobs: Sequence[Job], *, beside: int) -> bool:
        """Whether all of these can begin together now, besides so many answers in other batches."""
        submitted = [job.submitted for job in jobs]
        if any((model, one.objective) != self.key[:2] for model, one in submitted):
            return False
        first = self.is_idle and not beside  # no one else waits for the pass
        if len(submitted) == 1 and (first or self._batching != "steps"):
            return True
        new = [BatchRequest(one.prompt, options) for _, one in submitted for options in one.options]
        lengths = [len(one.prompt.ids) for _, one in submitted]
        if self._batching != "steps":  # they are one run
            return self._batching == "equal_lengths" and len(new) <= self._most and len({*lengths}) == 1
        reading = [request for writing, _ in self._reading for request in writing.requests if request.scored]
        read = sum(length for length in lengths if length <= _READ)  # longer prompts are read in pieces
        extra = sum(job.extra_rows for job in jobs)
        rows = beside + self.rows + len(new) - extra
        reads = read <= _READ * (1 + first) or (first and extra == len(new))
        return rows <= self._most and reads and self._batch.has_room([*reading, *new])

    def begin(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of requests, next to those that are being written; long ones in pieces.

        Requests that cannot join are written by themselves, between two steps of the others.
        """
        joining, apart = list[_Writing](), list[_Writing]()
        for writing in map(_Writing.of, jobs):
            (joining if self._can_join(writing.request) else apart).append(writing)
        if apart:
            self._begin(apart, self._write_whole)
        if not joining:
            return
        try:
            self._batch.require_the_same_model()
        except AnswerInterruptedError as error:  # the model was changed: this ends old answers, and no new ones
            self._end([writing for writing in self._writing if not writing.done], error)
        beside = len(self._batch.rows) + sum(len(writing.request.options) for writing in joining)
        for writing in joining:
            writing.draws = self._draws_of(writing.request, beside)
            beside += sum(map(len, writing.draws.values()))
        long = [writing for writing in joining if len(writing.request.prompt.ids) > _READ]
        self._reading += [(writing, self._batch.join_in_pieces(writing.requests, _READ)) for writing in long]
        if at_once := [writing for writing in joining if writing not in long]:
            self._begin(at_once, self._batch.join)

    def _can_join(self, request: Request[Any]) -> bool:
        if self._batching != "steps" or len(request.options) > self._most:
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
        drawn = [BatchRequest(prompt, one, scored=False) for own in draws.values() for one in own]
        fits = len(drawn) + beside <= 2 * self._most and all(self._batch.takes(prompt, one.options) for one in drawn)
        return draws if drawn and fits and self._batch.has_room(drawn, budgets=2) else {}

    def _write_whole(self, requests: Sequence[BatchRequest]) -> Sequence[WrittenAnswer]:
        with self._model.turn:
            self._model.require_known([request.prompt for request in requests])
            return self._model.write_whole(requests, most=self._most)

    def _begin(
        self,
        begun: Sequence[_Writing],
        read: Callable[[Sequence[BatchRequest]], Sequence[WrittenAnswer]],
    ) -> None:
        """Read prompts together, or where that fails one by one.

        What reads one prompt ends when its caller leaves; what reads several, only with the process.
        """
        work, alone = partial(read, [request for writing in begun for request in writing.requests]), len(begun) == 1
        try:
            rows = iter(begun[0].job.run(work) if alone else work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            if alone:
                self._failed(begun[0], error)
            else:
                for writing in begun:
                    self._begin([writing], read)
            return
        for writing in begun:
            writing.begin(rows)
            self._writing.append(writing)

    def _failed(self, writing: _Writing, error: BaseException) -> None:
        """A prompt cannot be read: its caller gets the error, unless there is room without the samples."""
        if not writing.draws or not is_out_of_memory(error):
            self._end([writing], error)
            return
        self._reading = [(one, pieces) for one, pieces in self._reading if one is not writing]
        writing.draws = {}
        self._begin([writing], self._batch.join)

    def _read_on(self) -> None:
        """Read one more piece of the prompt that has waited longest."""
        for number, (writing, pieces) in enumerate(list(self._reading)):
            try:
                writing.job.stops.check()
                if number == 0 and (rows := writing.job.run(partial(next, pieces))) is not None:
                    del self._reading[0]
                    writing.begin(iter(rows))
                    self._writing.append(writing)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._failed(writing, error)

    def step(self) -> None:
        """One more piece of a prompt, one more token of every answer, and the scores of those that are done.

        The step of one request alone ends within a layer of its stops, that of several between two steps.
        """
        self._read_on()
        for writing in list(self._writing):
            try:
                writing.job.stops.check()
            except AnswerInterruptedError as error:  # its caller has left, or its time is over
                self._end([writing], error)
        self._steps += 1
        unfinished = [writing for writing in self._writing if not writing.done]
        try:
            step = partial(self._batch.step, look=self._steps % _LOOK == 0)
            if len(self._writing) == 1:
                self._writing[0].job.run(step)
            else:
                step()
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end(unfinished, error)
        self._hand_over_sentences()
        self._settle()

    def end(self, error: BaseException) -> None:
        """Give every caller this error; the batch is given up with it."""
        for writing in (*self._writing, *(one for one, _ in self._reading)):
            writing.job.fail(error)

    def _hand_over_sentences(self) -> None:
        """Score the sentences that have ended, together with those of others that soon will have (as `_settle`)."""
        waiting = ((one, one.open) for one in self._writing if one.open and one.open.is_due)
        due = [(writing, found) for writing, found in waiting if not writing.answers[0].done]
        for _, found in due:
            found.waited += 1
        if not is_time_to_score([found for _, found in due], len(self._batch.rows)):
            return
        rows = [writing.answers[0] for writing, _ in due]
        try:
            with self._model.turn:  # in which the model is looked at once
                self._batch.require_the_same_model()
                ended = self._batch.ended(rows, [found.spans for _, found in due], [found.known for _, found in due])
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end([writing for writing, _ in due], error)
            return
        scored = list[tuple[_Writing, int]]()
        for (writing, found), sentences in zip(due, ended, strict=True):
            found.hand_over(found.known if sentences is None else len(found.spans))
            try:
                if sentences is None:
                    continue
                if writing.job.run(partial(self._goes_on, writing.request, sentences)):
                    scored.append((writing, sentences.scored))
                else:
                    self._batch.end(writing.answers[0], sentences.tokens)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._end([writing], error)
        try:
            self._batch.let_go([(writing.answers[0], tokens) for writing, tokens in scored])
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end([writing for writing, _ in scored], error)

    def _goes_on(self, request: Request[Any], sentences: EndedSentences) -> bool:
        with self._model.turn:
            return request.on_sentences is None or request.on_sentences(sentences)

    def _settle(self) -> None:
        """Score finished answers: together with others that soon will be, as long as that is a matter of steps."""
        for writing in [writing for writing in self._writing if writing.done]:
            if error := writing.error:
                self._end([writing], error)
        done = [writing for writing in self._writing if writing.done]
        for writing in done:
            writing.waited += 1
        if is_time([writing.waited for writing in done], len(self._batch.rows)):
            drawn = next((writing for writing in done if writing.samples), None)
            done = [writing for writing in done if not writing.samples] + ([drawn] if drawn else [])
            self._writing = [writing for writing in self._writing if writing not in done]
            self._deliver(done)

    def _deliver(self, done: Sequence[_Writing]) -> None:
        try:
            with self._model.turn:  # in which the model is looked at once
                rows = [row for writing in done for row in writing.answers]
                known = [writing.open and writing.open.known for writing in done for _ in writing.answers]
                most = self._model.max_batch or len(rows)
                parts = (slice(begin, begin + most) for begin in range(0, len(rows), most))
                generations = (one for part in parts for one in self._batch.generations(rows[part], known[part]))
                for writing in done:
                    own, request = [next(generations) for _ in writing.answers], writing.request
                    for plan, drawn in writing.samples.items():
                        if not any(row.error for row in drawn):  # else their estimator draws them itself
                            samples = self._batch.samples(drawn)
                            for one in own:
                                one.scoring.keep(plan, one.row, samples)
                    if error := writing.error:  # a listener did not take the last piece
                        writing.job.fail(error)
                    else:
                        writing.job.settle(partial(request.finish, own))
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            for writing in done:
                writing.job.fail(error)

    def _end(self, ended: Sequence[_Writing], error: BaseException) -> None:
        self._writing = [writing for writing in self._writing if writing not in ended]
        self._reading = [(one, pieces) for one, pieces in self._reading if one not in ended]
        try:
            self._batch.drop(row for writing in ended for row in writing.rows)
        finally:
            for writing in ended:
                writing.job.fail(error)
