"""A user's own chain or engine over graded examples, every scored draft recorded: the data of a calibration.

An integration runs the inputs (`Runs`); their answers are kept here, and an interrupted run resumes here. Grading and
calibrating come after it (`semgrad_guard.adapters.examples`).
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.adapters.code_identity import sixteen_digits
from semgrad_guard.calibration import Binding
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.evaluation.job_record import JobRecord, Progress
from semgrad_guard.guard import Steps, Work
from semgrad_guard.guard.verdicts import UNSCORED, RecordedDraft, RecordedScore, binding_of
from semgrad_guard.records import PromptForm

Aggregate = Literal["one", "max", "question"]
"""The draft that counts where one example has several: "one" is an error, "max" the least certain. So it is for whole
questions, which a guard ends at the first that it does not let through."""
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
        """The input as text, for graders that read it."""
        return self.input if isinstance(self.input, str) else json.dumps(self.input, default=str)


@dataclass(frozen=True)
class LabelledDraft:
    """A scored draft, and the names by which its call can be chosen."""

    draft: RecordedDraft
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ran:
    """The text that one run delivered, and the drafts that were scored on the way."""

    text: str
    drafts: Sequence[LabelledDraft]


class Runs(Protocol):
    """Runs of one chain or engine. `identity` is that of its steps, prompts, code and settings."""

    @property
    def identity(self) -> str: ...

    def run(self, inputs: Sequence[Any]) -> Sequence[Ran | Exception]:
        """Run inputs, all of them at once; an error takes the place of a result."""
        ...

    async def arun(self, inputs: Sequence[Any]) -> Sequence[Ran | Exception]:
        """Like `run`, on the event loop."""
        ...


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
    scores: dict[str, RecordedScore] = Field(default_factory=dict[str, RecordedScore])
    """Those of other estimators, by name."""
    others: tuple[PromptForm, ...] = ()
    """The prompts of a question's other calls."""
    recorded: bool = Field(default=False, exclude=True)
    """Whether it was read from a record."""


@dataclass(frozen=True)
class Collecting:
    """How examples are answered.

    Args:
        chain: the identity of the chain; a record of another one is refused.
        at_once: how many inputs are passed on together.
        aggregate: the draft that counts where one example has several.
        answering: counts only the drafts of calls with this label.
        record: a JSON Lines file that keeps every answer with its prompt; an interrupted run resumes from it, once some
            of its inputs were answered again as they were before.
        needed: the estimators whose scores every example needs, besides the model's own.
        progress: True: a line on stderr; a function is called with (done, in all); False: silence.
    """

    chain: str
    at_once: int = 1
    aggregate: Aggregate = "one"
    answering: str | None = None
    record: Path | None = None
    progress: Progress | bool = True
    needed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.needed and self.aggregate == "max":
            raise InputError(
                "estimator=... is for examples of one scored call, and aggregate joins the scores of several. Name the "
                "call that answers (answering=...), or give the chain's model that estimator, and leave it out here."
            )
        if self.at_once < 1:
            raise InputError(f"max_concurrency must be at least 1, not {self.at_once}")
        if self.aggregate not in ("one", "max", "question"):
            raise InputError(f"aggregate must be 'one' or 'max', not {self.aggregate!r}")
        if self.record is not None and not self.chain:
            raise InputError(
                "a record is continued for the same chain alone: give the chain a name with a version, "
                "name='support-bot 3', and another one when its documents, prompts or code change"
            )

    def chosen(self, drafts: Sequence[LabelledDraft], number: int) -> RecordedDraft:
        """The draft that counts for the example of this number.

        Raises:
            CalibrationError: there is none, or one cannot be chosen.
        """
        # A model and its guard may record one draft twice: the same text with the same score.
        same = attrgetter("text", "uncertainty", "model", "estimator")
        distinct = list({same(labelled.draft.verdict): labelled for labelled in drafts}.values())
        if not distinct:
            raise CalibrationError(
                f"Example {number} made no scored call, so there is no score to calibrate. The answering model must be "
                "one that semgrad-guard scores (and its answer must not come from a cache)."
            )
        labels = (
            ", ".join(sorted(frozenset[str]().union(*(labelled.labels for labelled in distinct))))
            or "they have no labels"
        )
        if self.answering is not None:
            distinct = [labelled for labelled in distinct if self.answering in labelled.labels]
            if not distinct:
                raise CalibrationError(
                    f"No scored call of example {number} has the label {self.answering!r}; there are: {labels}."
                )
        if len(distinct) > 1 and self.aggregate == "one":
            raise CalibrationError(
                f"Example {number} made {len(distinct)} scored calls, and a calibration needs one score for each. Name "
                f"the call that writes the answer (answering=...; labels: {labels}), or let the least certain count "
                "(aggregate='max')."
            )
        return least_certain([labelled.draft for labelled in distinct])

    def bound(self, binding: Binding) -> Binding:
        """The binding for a draft's: the worst of several scores is another number than the score of one."""
        if self.aggregate != "max":
            return binding
        return binding.model_copy(update={"settings": {**(binding.settings or {}), "aggregate": self.aggregate}})

    @contextmanager
    def opened(self, examples: Sequence[Example]) -> Generator[JobRecord[AnsweredExample] | None]:
        """The record, for as long as this lasts; None if there is none.

        Raises:
            InputError: it is of another chain, of other options or of other examples, or cannot be written.
        """
        if self.record is None:
            yield None
            return
        settings = {"chain": self.chain, "aggregate": self.aggregate, "answering": self.answering}
        try:
            record = JobRecord(self.record, settings, AnsweredExample, kind="examples")
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
    return max(drafts, key=lambda made: math.inf if made.verdict.uncertainty is None else made.verdict.uncertainty)


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
        CalibrationError: an example made no scored call, or several; drafts of different models or settings.
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
        if self._how.aggregate == "question" and not ran.drafts:  # nothing was retrieved, say
            return AnsweredExample(key=example.key, text=ran.text, uncertainty=None, binding=None, prompt=None)
        draft = self._how.chosen(ran.drafts, number)
        bound = None if draft.verdict.estimator == UNSCORED else self._how.bound(binding_of(draft.verdict))
        before = next((answer.binding for answer in self._done.values() if answer.binding is not None), bound)
        if bound is not None and before is not None and before != bound:
            raise CalibrationError(
                f"Example {number} was answered by another model, or scored in another way, than those before it "
                f"({bound.model_dump_json()} instead of {before.model_dump_json()}). A calibration is for one."
            )
        if bound is not None and (missing := [name for name in self._how.needed if name not in draft.scores]):
            raise CalibrationError(
                f"Example {number} has no score by {missing[0]}: its answer is made of several calls, or of none of a "
                "model at hand. Give the model that estimator itself, and leave estimator=... out."
            )
        prompt, others = draft.prompt, tuple[PromptForm, ...]()
        if self._how.aggregate == "question" and len(ran.drafts) > 1:
            prompts = ((one.draft, one.draft.prompt) for one in ran.drafts)
            named = [(made, replace(form, question=example.key)) for made, form in prompts if form is not None]
            prompt = next((form for made, form in named if made is draft), None)
            others = tuple(form for made, form in named if made is not draft)
        return AnsweredExample(
            key=example.key,
            text=ran.text,
            uncertainty=draft.verdict.uncertainty,
            binding=bound,
            prompt=prompt,
            cut=draft.verdict.cut,
            scores=_worst_scores(ran.drafts) if self._how.aggregate == "question" else dict(draft.scores),
            others=others,
        )


def _worst_scores(drafts: Sequence[LabelledDraft]) -> dict[str, RecordedScore]:
    """Of each estimator the score of the question: that of its least certain call."""

    def uncertainty(score: RecordedScore) -> float:
        return math.inf if score.uncertainty is None else score.uncertainty

    names = drafts[0].draft.scores
    return {name: max((one.draft.scores[name] for one in drafts), key=uncertainty) for name in names}


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
    return Example(question, answers, sixteen_digits(json.dumps(question, sort_keys=True, default=repr)))
