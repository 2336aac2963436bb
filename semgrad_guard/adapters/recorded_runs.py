"""A user's own chain or engine over graded examples, every scored draft recorded: the data of a calibration.

An integration knows how an input is asked (`Runs`). The score of a question is that of its least certain call: a guard
ends it at the first that it does not let through. Grading and calibrating come after it
(`semgrad_guard.adapters.examples`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration import Binding
from semgrad_guard.declared import plain
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.grading.candidates import FREE
from semgrad_guard.guard.decision import UNSCORED, binding_of, doubt_of, without_cut_score
from semgrad_guard.guard.question import RecordedDraft, RecordedScore, Router, asking, recording
from semgrad_guard.guard.steps import Steps, Work, adrive, drive
from semgrad_guard.questions.run_record import JobRecord, Progress, unwatched
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import OnCut


@dataclass(frozen=True)
class Example:
    """A chain's input and its right answers: none where every claim is wrong. `key` follows the input."""

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


Ran = tuple[str, Sequence[RecordedDraft]]
"""The text that one run delivered, and the drafts that were scored on the way."""


@dataclass(frozen=True, kw_only=True)
class Runs(ABC):
    """Runs of one chain or engine, each recorded and in a conversation of its own.

    Args:
        name: the chain's name and version.
        router: that of a guarded chain, whose calls alone count; None: all calls do.
        output: finds the delivered text in the chain's output.
    """

    name: str
    router: Router | None
    output: Callable[[Any], str]

    @abstractmethod
    def response_of(self, given: Any) -> Steps[Any]:
        """The chain's output for an input, in a conversation that begins with it."""

    def work(self, inputs: Sequence[Any], recorded: Sequence[Estimator]) -> Work:
        """The work of running inputs, several at once; its result is a `Ran` for each, or an error in its place.

        Their drafts are scored by the `recorded` estimators as well.
        """
        ran = partial(self._ran, recorded)

        def call() -> list[Ran | Exception]:
            if len(inputs) == 1:
                return [drive(ran(inputs[0]))]
            with ThreadPoolExecutor(len(inputs)) as pool:
                return list(pool.map(drive, map(ran, inputs)))

        async def coroutine() -> list[Ran | Exception]:
            return list(await asyncio.gather(*(adrive(ran(given)) for given in inputs)))

        return Work(call, coroutine)

    def _ran(self, recorded: Sequence[Estimator], given: Any) -> Steps[Ran | Exception]:
        try:
            with recording(recorded) as recorder, ExitStack() as scope:
                if self.router is not None:
                    recorder.question = scope.enter_context(asking(self.router))
                made = yield from self.response_of(given)
            unscored = [one.verdict.reason for one in recorder.drafts if one.verdict.status == "unscored"]
            if unscored:
                raise CalibrationError(f"The answer has no score to calibrate: {unscored[0]}. Leave it out.")
            return plain("the output of a chain", self.output(made), str), recorder.drafts
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

    def judged(self, on_cut: OnCut) -> AnsweredExample:
        """With the scores that count for a guard with this rule about answers that a limit cut off."""
        if on_cut == "score" or self.cut_calls is None or (on_cut, self.cut_calls) == ("unscored", "abstain"):
            return self
        none = {name: RecordedScore(uncertainty=None, settings=one.settings) for name, one in self.scores.items()}
        return self.model_copy(update={"uncertainty": None, "scores": none})


def read_examples(examples: Iterable[Any]) -> list[Example]:
    """Pairs of (input, right answer or answers), or mappings with "input" and "answers"; None or [] for none.

    Raises:
        InputError: an entry is neither, or there are none.
    """
    given_ones = examples if isinstance(cast("object", examples), Iterable) else ()
    read = [_example(given, number) for number, given in enumerate(given_ones, start=1)]
    if not read:
        raise InputError("there are no examples to calibrate on")
    return read


def collected(
    examples: Sequence[Example],
    runs: Runs,
    *,
    needed: Sequence[Estimator] = (),
    record: Path | None = None,
    max_concurrency: int = 1,
    progress: Progress | bool = True,
) -> Steps[list[AnsweredExample]]:
    """Answer the examples, those of one input once; an entry for each example, in order.

    Args:
        examples: the inputs.
        runs: answers them.
        needed: the estimators whose scores every example needs, besides the model's own. Those that cost nothing are
            recorded as well.
        record: a JSON Lines file that keeps every answer with its prompts; an interrupted run resumes from it.
        max_concurrency: how many inputs are passed on together.
        progress: True: a line on stderr; a function is called with (done, in all); False: silence.

    Raises:
        CalibrationError: drafts of different models or settings, or without a score.
        InputError: the record is of another chain or of other examples, or cannot be written.
        Exception: the chain's own, noted with its example; the answers so far are in the record.
    """
    if not isinstance(cast("object", max_concurrency), int) or max_concurrency < 1:
        raise InputError(f"max_concurrency is a number, at least 1, not {max_concurrency!r:.60}")
    if not (isinstance(cast("object", progress), bool) or callable(progress)):
        raise InputError(f"progress is True, False or a function of (done, in all), not {progress!r:.60}")
    report: Progress = _line if progress is True else progress or unwatched
    recorded = tuple({estimator.name: estimator for estimator in (*FREE, *needed)}.values())
    names = [estimator.name for estimator in needed]
    distinct = {example.key: (number, example) for number, example in reversed(list(enumerate(examples, start=1)))}
    with _opened(record, runs.name, distinct) as kept:
        done = {} if kept is None else dict(kept.rows)
        scored = ((name, row) for row in done.values() if row.binding for name in names)
        if missing := next((name for name, row in scored if name not in row.scores), None):
            raise InputError(f"{record} holds no scores by {missing}. Choose another file for this estimator.")
        waiting = sorted((pair for key, pair in distinct.items() if key not in done), key=itemgetter(0))
        report(len(done), len(distinct))
        while waiting:
            batch, waiting = waiting[:max_concurrency], waiting[max_concurrency:]
            results = yield runs.work([example.input for _, example in batch], recorded)
            failed: list[Exception] = []
            for (number, example), result in zip(batch, results, strict=True):
                try:
                    answered = _answered(example, result, number, done.values(), names)
                except Exception as error:  # noqa: BLE001 - raised once the others of the batch are kept
                    error.add_note(f"This was example {number} of {len(examples)}.")
                    failed.append(error)
                    continue
                if kept is not None:
                    kept.append([answered])
                done[example.key] = answered
            if failed:
                raise failed[0]
            report(len(done), len(distinct))
    return [done[example.key] for example in examples]


def _line(done: int, total: int) -> None:
    """How far the work is: a line on stderr, rewritten."""
    print(f"\rAnswering: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


@contextmanager
def _opened(path: Path | None, chain: str, keys: Collection[str]) -> Generator[JobRecord[AnsweredExample] | None]:
    """The record, for as long as this lasts; None if there is none.

    Raises:
        BindingMismatchError: it is of another chain.
        InputError: it is of other examples, or cannot be written.
    """
    if path is None:
        yield None
        return
    if not chain:
        raise InputError(
            "a record is continued for the same chain alone: give the chain a name with a version, "
            "name='support-bot 3', and another one when its documents, prompts or code change"
        )
    with JobRecord(path, {"chain": chain}, AnsweredExample, kind="examples") as record:
        if record.rows.keys() - keys:
            raise InputError(
                f"{path} answers an input that is not among the examples. Choose another file for other examples."
            )
        yield record


def _answered(
    example: Example, ran: Ran | Exception, number: int, others: Iterable[AnsweredExample], needed: Sequence[str]
) -> AnsweredExample:
    """What a run made of an example; `others` are bound to the same model.

    Raises:
        CalibrationError: it is bound to another, or lacks a score that is needed.
        Exception: the run's own.
    """
    if isinstance(ran, Exception):
        raise ran
    text, drafts = ran
    if not drafts:  # nothing was retrieved, say
        return AnsweredExample(key=example.key, text=text, uncertainty=None, binding=None, prompt=None)
    draft = max(drafts, key=lambda one: doubt_of(one.verdict))
    bound = None if draft.verdict.estimator == UNSCORED else binding_of(draft.verdict)
    before = next((answer.binding for answer in others if answer.binding is not None), bound)
    if bound is not None and before is not None and before != bound:
        raise CalibrationError(
            f"Example {number} was answered by another model, or scored in another way, than those before it "
            f"({bound.model_dump_json()} instead of {before.model_dump_json()}). A calibration is for one."
        )
    if bound is not None and (missing := [name for name in needed if name not in draft.scores]):
        raise CalibrationError(
            f"Example {number} has no score by {missing[0]}: its answer is of no model at hand. Give the model "
            "that estimator itself, and leave estimator=... out."
        )
    prompts = {
        id(one): one.prompt if len(drafts) == 1 or one.prompt is None else replace(one.prompt, question=example.key)
        for one in drafts
    }
    names = set(drafts[0].scores).intersection(*(one.scores for one in drafts))
    return AnsweredExample(
        key=example.key,
        text=text,
        uncertainty=draft.verdict.uncertainty,
        binding=bound,
        prompt=prompts.pop(id(draft)),
        cut=draft.verdict.details.cut,
        cut_calls=_cut_calls(drafts),
        scores={name: max((one.scores[name] for one in drafts), key=doubt_of) for name in sorted(names)},
        others=tuple(prompt for prompt in prompts.values() if prompt is not None),
    )


def _cut_calls(drafts: Sequence[RecordedDraft]) -> OnCut | None:
    verdicts = [one.verdict for one in drafts]
    rules: tuple[OnCut, ...] = ("unscored", "abstain")
    return next((rule for rule in rules if any(without_cut_score(one, rule) is not one for one in verdicts)), None)


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
            f"example {number} needs a right answer as text, or several; None or [] where every claim is wrong"
        )
    key = hashlib.sha256(json.dumps(question, sort_keys=True, default=repr).encode()).hexdigest()[:16]
    return Example(question, answers, key)
