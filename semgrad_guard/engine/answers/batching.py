"""The batches in which requests are answered together.

Requests join and leave a batch at every step, or where a model cannot, they are answered in whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.answers.request import Job, Request
from semgrad_guard.engine.answers.sentences import EndedSentences, OpenSentences
from semgrad_guard.engine.answers.writing import BatchRequest, WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import is_out_of_memory
from semgrad_guard.errors import AnswerInterruptedError

_READ = 256  # tokens of prompts that are read between two steps of the answers that are being written
_LINGER = 4  # steps that an answer, or its sentences, wait for others to be scored with
_CELLS = 1 << 11  # tokens of a whole run for each of its rows, padding counted: they bound its memory
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
    draws: Mapping[Sampling, Sequence[GenerationOptions]]
    open: OpenSentences | None = None
    answers: list[WrittenAnswer] = field(default_factory=list[WrittenAnswer])
    samples: dict[Sampling, list[WrittenAnswer]] = field(default_factory=dict[Sampling, list[WrittenAnswer]])
    waited: int = 0

    @property
    def requests(self) -> list[BatchRequest]:
        """Its answers and samples as requests to the batch."""
        request = self.job.submitted[1]
        listener = request.on_piece if self.open is None else self.open.add
        drawn = [options for draw in self.draws.values() for options in draw]
        return [
            *(BatchRequest(request.prompt, one, None if n else listener) for n, one in enumerate(request.options)),
            *(BatchRequest(request.prompt, one, scored=False) for one in drawn),
        ]

    def begin(self, rows: Iterator[WrittenAnswer]) -> None:
        """Take the rows that were made of its requests."""
        self.answers = [next(rows) for _ in self.job.submitted[1].options]
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
    """Requests of one model and objective join a running batch at any step, and leave it when they are done."""

    looks_behind = False

    def __init__(self, model: WritingModel, objective: Objective, rows: int) -> None:
        self.key = model, objective
        self._model, self._most = model, rows
        self._batch = model.running_batch(objective)
        self._writing: list[_Writing] = []
        self._reading: list[tuple[_Writing, Iterator[list[WrittenAnswer] | None]]] = []
        self._steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read or written."""
        return not self._writing and not self._reading

    @property
    def rows(self) -> int:
        """How many answers are being written, or will be, without samples and those that count for no limit."""
        begin = sum(len(one.job.submitted[1].options) for one, _ in self._reading if not one.job.extra_rows)
        writing = [row for one in self._writing if not one.job.extra_rows for row in one.answers]
        return begin + sum(not row.done for row in writing)

    def has_room(self, jobs: Sequence[Job], *, beside: int) -> bool:
        """Whether all of these can join now, besides so many answers in other batches."""
        submitted = [job.submitted for job in jobs]
        if any((model, one.objective) != self.key for model, one in submitted):
            return False
        first = self.is_idle and not beside  # no one else waits for the pass
        if first and len(submitted) == 1:
            return True
        new = [BatchRequest(one.prompt, options) for _, one in submitted for options in one.options]
        reading = [request for writing, _ in self._reading for request in writing.requests if request.scored]
        lengths = [len(one.prompt.ids) for _, one in submitted]
        read = sum(length for length in lengths if length <= _READ)  # longer prompts are read in pieces
        extra = sum(job.extra_rows for job in jobs)
        rows = beside + self.rows + len(new) - extra
        reads = read <= _READ * (1 + first) or (first and extra == len(new))
        return rows <= self._most and reads and self._batch.has_room([*reading, *new])

    def begin(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of requests, next to those that are being written.

        A request that cannot join is written by itself, between two steps of the others.
        """
        joining = list[_Writing]()
        for job in jobs:
            if self._can_join(job.submitted[1]):
                sentences = OpenSentences() if job.submitted[1].on_sentences else None
                joining.append(_Writing(job, {}, sentences))
            else:
                WholeRuns(self._most).begin([job])
        if not joining:
            return
        try:
            self._batch.require_the_same_model()
        except AnswerInterruptedError as error:  # the model was changed: this ends old answers, and no new ones
            self._end([writing for writing in self._writing if not writing.done], error)
        beside = len(self._batch.rows) + sum(len(writing.job.submitted[1].options) for writing in joining)
        for writing in joining:
            writing.draws = self._draws_of(writing.job.submitted[1], beside)
            beside += sum(map(len, writing.draws.values()))
        self._begin(joining)

    def _draws_of(self, request: Request[Any], beside: int) -> Mapping[Sampling, Sequence[GenerationOptions]]:
        """The samples that are drawn next to so many rows; an estimator draws those itself that have no room here."""
        prompt, options = request.prompt, request.options[0]
        draws = {
            plan: [self._model.fitted(one, prompt) for one in plan.rows(prompt.ids, options)] for plan in request.draws
        }
        drawn = [BatchRequest(prompt, one, scored=False) for own in draws.values() for one in own]
        fits = len(drawn) + beside <= 2 * self._most and all(self._batch.takes(prompt, one.options) for one in drawn)
        return draws if drawn and fits and self._batch.has_room(drawn, budgets=2) else {}

    def _can_join(self, request: Request[Any]) -> bool:
        try:
            self._model.require_known([request.prompt])
            fits = len(request.options) <= self._most
            return fits and all(self._batch.takes(request.prompt, options) for options in request.options)
        except Exception:  # noqa: BLE001 - raised again where it is written
            return False

    def _begin(self, joining: Sequence[_Writing]) -> None:
        """Read prompts in one pass, or where that fails one by one; long ones in pieces.

        The pass that reads one prompt ends when its caller leaves; one that reads several, only with the process.
        """
        long = [writing for writing in joining if len(writing.job.submitted[1].prompt.ids) > _READ]
        self._reading += [(writing, self._batch.join_in_pieces(writing.requests, _READ)) for writing in long]
        if not (at_once := [writing for writing in joining if writing not in long]):
            return
        requests = [request for writing in at_once for request in writing.requests]
        alone = at_once[0] if len(at_once) == 1 else None
        try:
            rows = iter(alone.job.run(lambda: self._batch.join(requests)) if alone else self._batch.join(requests))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            if alone:
                self._failed(alone, error)
            else:
                for writing in at_once:
                    self._begin([writing])
            return
        for writing in at_once:
            writing.begin(rows)
            self._writing.append(writing)

    def _failed(self, writing: _Writing, error: BaseException) -> None:
        """A prompt cannot be read: its caller gets the error, unless there is room without the samples."""
        self._reading = [(other, pieces) for other, pieces in self._reading if other is not writing]
        if not writing.draws or not is_out_of_memory(error):
            self._end([writing], error)
            return
        writing.draws = {}
        self._begin([writing])

    def _give_up_draws(self) -> None:
        """Leave samples that cannot be drawn here to their estimator."""
        for writing in self._writing:
            failed = [plan for plan, rows in writing.samples.items() if any(row.error for row in rows)]
            for plan in failed:
                self._batch.drop(writing.samples.pop(plan))

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
        self._give_up_draws()
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
                if writing.job.run(partial(self._goes_on, writing, sentences)):
                    scored.append((writing, sentences.scored))
                else:
                    self._batch.end(writing.answers[0], sentences.tokens)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self._end([writing], error)
        try:
            self._batch.let_go([(writing.answers[0], tokens) for writing, tokens in scored])
        except BaseException as error:  # noqa: BLE001 - raised by the callers
            self._end([writing for writing, _ in scored], error)

    def _goes_on(self, writing: _Writing, sentences: EndedSentences) -> bool:
        listener = writing.job.submitted[1].on_sentences
        with self._model.turn:
            return listener is None or listener(sentences)

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
                generations = iter(self._batch.generations(rows, known))
                for writing in done:
                    own, job = [next(generations) for _ in writing.answers], writing.job
                    for plan, drawn in writing.samples.items():
                        samples = self._batch.samples(drawn)
                        for one in own:
                            one.scoring.keep_samples(one.row, plan, samples)
                    if error := writing.error:  # a listener did not take the last piece
                        job.fail(error)
                    else:
                        job.settle(lambda job=job, own=own: job.submitted[1].finish(own))
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


class WholeRuns:
    """Each run of the model answers one request, or several with prompts of one length, from the first token to the
    last.

    Up to so many `rows`. `looks_behind`: a request may begin together with the first of the queue, before others
    between them, which cannot.
    """

    looks_behind = True

    def __init__(self, rows: int) -> None:
        self._most = rows

    def has_room(self, jobs: Sequence[Job], *, beside: int) -> bool:
        """Whether these can be one run."""
        del beside
        submitted = [job.submitted for job in jobs]
        if len(submitted) == 1:
            return True
        rows = sum(len(one.options) for _, one in submitted)
        most = self._most + sum(job.extra_rows for job in jobs)
        longest = max(len(one.prompt.ids) + options.max_tokens for _, one in submitted for options in one.options)
        fit = rows <= most and rows * longest <= _CELLS * most
        alike = {(id(model), one.objective, len(one.prompt.ids)) for model, one in submitted}
        return fit and len(alike) == 1

    def begin(self, jobs: Sequence[Job]) -> None:
        """Answer them, one alone under its stops; where several fail, each by itself."""
        results = None
        if len(jobs) > 1:
            with suppress(BaseException):  # raised again by the request that causes it
                results = _written([job.submitted for job in jobs])
        for index, job in enumerate(jobs):
            if results is None:
                job.settle(lambda job=job: self._alone(*job.submitted))
            else:
                job.settle(lambda own=results[index]: own)

    def _alone(self, model: WritingModel, request: Request[Any]) -> Any:
        """The result of one request: its answers together, as far as there is room."""
        most = self._most
        with model.turn:
            parts = [request.options[n : n + most] for n in range(0, len(request.options), most)]
            found = [_run(model, [replace(request, options=options)]) for options in parts]
            return request.finish([one for part in found for one in part])


def _written(submitted: Sequence[tuple[WritingModel, Request[Any]]]) -> list[Any]:
    """The results of requests to one model, written in one run."""
    model, requests = submitted[0][0], [request for _, request in submitted]
    with model.turn:  # in which the model is looked at once, for the answers and for their scores
        written = iter(_run(model, requests))
        return [request.finish([next(written) for _ in request.options]) for request in requests]


def _run(model: WritingModel, requests: Sequence[Request[Any]]) -> list[Generation]:
    return model.write_whole(
        [
            BatchRequest(request.prompt, options, None if number else request.on_piece)
            for request in requests
            for number, options in enumerate(request.options)
        ]
    )


Batcher = RunningRequests | WholeRuns
