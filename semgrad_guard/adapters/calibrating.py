"""A user's own chain or engine over graded examples, every scored draft recorded: the data of a calibration.

An integration knows how an input is asked (`Runs`). The score of a question is that of its least certain call: a guard
ends it at the first that it does not let through. Answers are kept here, and an interrupted run resumes here. Grading
and calibrating come after it (`semgrad_guard.adapters.examples`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration import Binding
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Router, Steps, Work, adrive, asking, drive, recording
from semgrad_guard.guard.cut_answers import without_cut_score
from semgrad_guard.guard.verdicts import UNSCORED, RecordedDraft, RecordedScore, binding_of, doubt_of
from semgrad_guard.questions.job_record import JobRecord, Progress
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import OnCut

_TRIED = 3
"""Recorded inputs that are run again before a record is believed."""


@dataclass(frozen=True)
class Example:
    """A chain's input and its right answers: none where only an abstention is right. `key` follows the input."""

    input: Any
    answers: tuple[str, ...]
    key: str

    @property
    def question(self) -> str:
        """The input as text, for graders that read it and for sheets; of a mapping its question, if it has one."""
        given: Any = self.input
        if isinstance(given, Mapping):
            found = cast("dict[str, Any]", given)
            given = next((found[name] for name in ("question", "input", "query") if name in found), found)
        return given if isinstance(given, str) else json.dumps(given, default=str)


@dataclass(frozen=True)
class Ran:
    """The text that one run delivered, and the drafts that were scored on the way."""

    text: str
    drafts: Sequence[RecordedDraft]


class Runs(ABC):
    """Runs of one chain or engine, each recorded and in a conversation of its own.

    Args:
        name: the chain's name and version.
        router: that of a guarded chain, whose calls alone count; None: all calls do.
        output: finds the delivered text in the chain's output.
        recorded: estimators by which drafts are scored as well.
    """

    def __init__(
        self, name: str, router: Router | None, output: Callable[[Any], str], recorded: Sequence[Estimator]
    ) -> None:
        self.name, self._router, self._output, self._recorded = name, router, output, recorded

    @abstractmethod
    def response_of(self, given: Any) -> Steps[Any]:
        """The chain's output for an input, in a conversation that begins with it."""

    def run(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Run inputs, in a thread for each where there are several; an error takes the place of a result."""
        if len(inputs) == 1:
            return [drive(self._ran(inputs[0]))]
        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(drive, map(self._ran, inputs)))

    async def arun(self, inputs: Sequence[Any]) -> list[Ran | Exception]:
        """Like `run`, on the event loop."""
        return list(await asyncio.gather(*(adrive(self._ran(given)) for given in inputs)))

    def _ran(self, given: Any) -> Steps[Ran | Exception]:
        try:
            with recording(self._recorded) as recorder, ExitStack() as scope:
                if self._router is not None:
                    recorder.question = scope.enter_context(asking(self._router))
                made = yield from self.response_of(given)
            unscored = [one.verdict.reason for one in recorder.drafts if one.verdict.status == "unscored"]
            if unscored:
                raise CalibrationError(f"The answer has no score to calibrate: {unscored[0]}. Leave it out.")
            return Ran(self._output(made), recorder.drafts)
        except Exception as error:  # noqa: BLE001 - raised by `collected`, with its example
            return error


class AnsweredExample(BaseModel):
    """One example, answered: the delivered text and the draft that counts. A line of a record.

    It has no binding where no model ran.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    text: str
    uncertainty: float | None
    binding: Binding | None
    prompt: PromptForm | None
    cut: int | str | None = None
    cut_calls: OnCut | None = None
    """The mildest rule by which a call of the question that a limit cut off has no score; None: no call."""
    scores: dict[str, RecordedScore] = Field(default_factory=dict[str, RecordedScore])
    """Those of other estimators, by name."""
    others: tuple[PromptForm, ...] = ()
    """The prompts of a question's other calls."""
    recorded: bool = Field(default=False, exclude=True)
    """Whether it was read from a record."""

    def judged(self, on_cut: OnCut) -> AnsweredExample:
        """With the scores that count for a guard with this rule about answers that a limit cut off."""
        if on_cut == "score" or self.cut_calls is None or (on_cut, self.cut_calls) == ("unscored", "abstain"):
            return self
        none = {name: RecordedScore(uncertainty=None, settings=one.settings) for name, one in self.scores.items()}
        return self.model_copy(update={"uncertainty": None, "scores": none})


@dataclass(frozen=True)
class Collecting:
    """How examples are answered.

    Args:
        chain: the name and version of the chain; a record of another one is refused.
        at_once: how many inputs are passed on together.
        record: a JSON Lines file that keeps every answer with its prompts; an interrupted run resumes from it, once
            some of its inputs were answered again as they were before.
        needed: the estimators whose scores every example needs, besides the model's own.
        progress: True: a line on stderr; a function is called with (done, in all); False: silence.
    """

    chain: str
    at_once: int = 1
    record: Path | None = None
    progress: Progress | bool = True
    needed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise InputError(f"max_concurrency must be at least 1, not {self.at_once}")
        if self.record is not None and not self.chain:
            raise InputError(
                "a record is continued for the same chain alone: give the chain a name with a version, "
                "name='support-bot 3', and another one when its documents, prompts or code change"
            )

    @contextmanager
    def opened(self, examples: Sequence[Example]) -> Generator[JobRecord[AnsweredExample] | None]:
        """The record, for as long as this lasts; None if there is none.

        Raises:
            InputError: it is of another chain, of other options or of other examples, or cannot be written.
        """
        if self.record is None:
            yield None
            return
        try:
            record = JobRecord(self.record, {"chain": self.chain}, AnsweredExample, kind="examples")
        except BindingMismatchError as error:
            raise InputError(
                f"{self.record} is not a record of this chain with these options: {error.differences}. Choose another "
                "file, or delete it to begin anew."
            ) from error
        with record:
            if record.rows.keys() - {example.key for example in examples}:
                raise InputError(
                    f"{self.record} answers an input that is not among the examples. Choose another file for other "
                    "examples."
                )
            yield record


def least_certain(drafts: Sequence[RecordedDraft]) -> RecordedDraft:
    """The draft of the highest uncertainty; one without a score is less certain than any other."""
    return max(drafts, key=lambda made: doubt_of(made.verdict))


def read_examples(examples: Iterable[Any]) -> list[Example]:
    """Pairs of (input, right answer or answers), or mappings with "input" and "answers"; None or [] for none.

    Raises:
        InputError: an entry is neither, or there are none.
    """
    read = [_example(given, number) for number, given in enumerate(examples, start=1)]
    if not read:
        raise InputError("there are no examples to calibrate on")
    return read


def collected(examples: Sequence[Example], runs: Runs, how: Collecting) -> Steps[list[AnsweredExample]]:
    """Answer the examples, those of one input once; an entry for each example, in order.

    Raises:
        CalibrationError: drafts of different models or settings, or without a score.
        InputError: the record is of another chain or of other examples, or its inputs are answered otherwise now.
        Exception: the chain's own, noted with its example; the answers so far are in the record.
    """

    def running(batch: Sequence[Example]) -> Work:
        inputs = [example.input for example in batch]
        return Work(lambda: runs.run(inputs), lambda: runs.arun(inputs))

    with how.opened(examples) as record:
        answering = _Answering(examples, how, record)
        again: list[Ran | Exception] = []
        for example in answering.tried:
            again += yield running([example])
        answering.retry(again)
        while batch := answering.next():
            answering.keep(batch, (yield running(batch)))
        return answering.answers()


class _Answering:
    """The examples with and without an answer; `tried` are recorded inputs that are to be run again first."""

    def __init__(self, examples: Sequence[Example], how: Collecting, record: JobRecord[AnsweredExample] | None) -> None:
        self._examples, self._how, self._record = examples, how, record
        self._numbers = {example.key: number for number, example in reversed(list(enumerate(examples, start=1)))}
        recorded = {} if record is None else record.rows
        pairs = ((name, row) for row in recorded.values() if row.binding for name in how.needed)
        if missing := next((name for name, row in pairs if name not in row.scores), None):
            raise InputError(f"{how.record} holds no scores by {missing}. Choose another file for this estimator.")
        self._done = {key: row.model_copy(update={"recorded": True}) for key, row in recorded.items()}
        distinct = {example.key: example for example in examples}
        known = self.tried = [example for key, example in distinct.items() if key in self._done]
        if len(known) > _TRIED:  # the first, the last and one in between
            between = random.Random(len(known)).randrange(1, len(known) - 1)
            self.tried = [known[0], known[between], known[-1]]
        self._waiting = [example for key, example in distinct.items() if key not in self._done]
        self._in_all = len(distinct)
        self._report: Progress = (
            ProgressLine() if how.progress is True else how.progress or (lambda _done, _total: None)
        )
        self._report(len(self._done), self._in_all)

    def next(self) -> list[Example]:
        """The next inputs to run; none when all are answered."""
        batch, self._waiting = self._waiting[: self._how.at_once], self._waiting[self._how.at_once :]
        return batch

    def keep(self, batch: Sequence[Example], ran: Sequence[Ran | Exception]) -> None:
        """Record the answers, and raise the first error."""
        failed: list[Exception] = []
        for example, result in zip(batch, ran, strict=True):
            number = self._numbers[example.key]
            try:
                if isinstance(result, Exception):
                    raise result
                answered = self._answered(example, result, number)
            except Exception as error:  # noqa: BLE001 - raised once the others of the batch are kept
                error.add_note(f"This was example {number} of {len(self._examples)}.")
                failed.append(error)
                continue
            if self._record is not None:
                self._record.append([answered])
            self._done[example.key] = answered
        if failed:
            raise failed[0]
        self._report(len(self._done), self._in_all)

    def retry(self, ran: Sequence[Ran | Exception]) -> None:
        """Compare the new answers to recorded inputs with the record.

        A sampled answer is another one each time, and in half precision an answer may depend on its batch: then the
        prompts must be the same, and in half precision one of the answers.

        Raises:
            InputError: the answers differ.
        """
        same: list[bool] = []
        for example, result in zip(self.tried, ran, strict=True):
            if isinstance(result, Exception):
                raise result
            now, before = self._answered(example, result, self._numbers[example.key]), self._done[example.key]
            if now.prompt != before.prompt:
                raise self._changed(example, "its prompt is another one")
            same.append(now.text == before.text)
        bindings = (self._done[example.key].binding for example in self.tried)
        settings = next((binding.settings for binding in bindings if binding is not None), None) or {}
        half = settings.get("dtype") not in (None, "float32")
        if "temperature" in settings or (any(same) if half else all(same)):
            return
        raise self._changed(self.tried[same.index(False)], "it is answered otherwise")

    def _changed(self, example: Example, how: str) -> InputError:
        return InputError(
            f"{self._how.record} is not a record of this chain as it is now: example {self._numbers[example.key]} was "
            f"run again, and {how} (other documents, another model, other code). Choose another file, or delete it to "
            "begin anew."
        )

    def answers(self) -> list[AnsweredExample]:
        """An entry for each example."""
        return [self._done[example.key] for example in self._examples]

    def _answered(self, example: Example, ran: Ran, number: int) -> AnsweredExample:
        if not ran.drafts:  # nothing was retrieved, say
            return AnsweredExample(key=example.key, text=ran.text, uncertainty=None, binding=None, prompt=None)
        draft = least_certain(ran.drafts)
        bound = None if draft.verdict.estimator == UNSCORED else binding_of(draft.verdict)
        before = next((answer.binding for answer in self._done.values() if answer.binding is not None), bound)
        if bound is not None and before is not None and before != bound:
            raise CalibrationError(
                f"Example {number} was answered by another model, or scored in another way, than those before it "
                f"({bound.model_dump_json()} instead of {before.model_dump_json()}). A calibration is for one."
            )
        if bound is not None and (missing := [name for name in self._how.needed if name not in draft.scores]):
            raise CalibrationError(
                f"Example {number} has no score by {missing[0]}: its answer is of no model at hand. Give the model "
                "that estimator itself, and leave estimator=... out."
            )
        prompts = [_of_question(one, example, alone=len(ran.drafts) == 1) for one in ran.drafts]
        return AnsweredExample(
            key=example.key,
            text=ran.text,
            uncertainty=draft.verdict.uncertainty,
            binding=bound,
            prompt=next(prompt for one, prompt in zip(ran.drafts, prompts, strict=True) if one is draft),
            cut=draft.verdict.details.cut,
            cut_calls=_cut_calls(ran.drafts),
            scores=_worst_scores(ran.drafts),
            others=tuple(p for one, p in zip(ran.drafts, prompts, strict=True) if one is not draft and p is not None),
        )


def _of_question(draft: RecordedDraft, example: Example, *, alone: bool) -> PromptForm | None:
    """A draft's prompt; one of several of a question names it."""
    return draft.prompt if alone or draft.prompt is None else replace(draft.prompt, question=example.key)


def _cut_calls(drafts: Sequence[RecordedDraft]) -> OnCut | None:
    verdicts = [one.verdict for one in drafts]
    rules: tuple[OnCut, ...] = ("unscored", "abstain")
    return next((rule for rule in rules if any(without_cut_score(one, rule) is not one for one in verdicts)), None)


def _worst_scores(drafts: Sequence[RecordedDraft]) -> dict[str, RecordedScore]:
    """Of each estimator the score of the question: that of its least certain call."""
    names = set(drafts[0].scores).intersection(*(one.scores for one in drafts))
    return {name: max((one.scores[name] for one in drafts), key=doubt_of) for name in sorted(names)}


class ProgressLine:
    """One line on stderr, rewritten: how far the work is, its rate and the time left."""

    def __init__(self) -> None:
        self._began, self._first = time.monotonic(), -1

    def __call__(self, done: int, total: int) -> None:
        if self._first < 0:
            self._began, self._first = time.monotonic(), done
        seconds, fresh, pace = time.monotonic() - self._began, done - self._first, ""
        if fresh > 0 and seconds > 0:
            left = round(seconds / fresh * (total - done))
            pace = f", {fresh / seconds:.1f} a second, {left // 60}:{left % 60:02} left   "
        end = "\n" if done == total else ""
        print(f"\rAnswering: {done} of {total}{pace}", end=end, file=sys.stderr, flush=True)


def _example(given: Any, number: int) -> Example:
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, Any]", given)
        if not {"input", "answers"} <= fields.keys():
            raise InputError(f'example {number} needs the keys "input" and "answers"; it has {", ".join(fields)}')
        question, right = fields["input"], fields["answers"]
    elif isinstance(given, (tuple, list)) and len(cast("Sequence[Any]", given)) == 2:
        question, right = cast("tuple[Any, Any]", given)
    else:
        raise InputError(f'example {number} is neither (input, answers) nor {{"input": ..., "answers": [...]}}')
    several = cast("Iterable[Any]", right) if isinstance(right, Iterable) else (right,)
    answers = () if right is None else (right,) if isinstance(right, str) else tuple(several)
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise InputError(
            f"example {number} needs a right answer as text, or several; None or [] where no answer is right but an "
            "abstention"
        )
    return Example(question, answers, _key_of(question))


def _key_of(question: Any) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=repr).encode()).hexdigest()[:16]
