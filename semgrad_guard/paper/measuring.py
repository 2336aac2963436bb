"""The measurements of one batch of answers, kept method by method: an interruption loses one at most.

A batch that is not whole yet has a record next to the run's. Its answers are generated again when the run is
continued (greedily, or from their seeds), and the record counts only for the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.answers.options import plan_record
from semgrad_guard.errors import BindingMismatchError, DetachedRecordError, InputError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.gradients import ObservedEstimator, ReplayEstimator
from semgrad_guard.estimators.reading import MutualInformation
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.questions.answered import AnswerScore, SampleSet
from semgrad_guard.questions.job_record import JobRecord
from semgrad_guard.questions.run import kept_score, observing_first

_DIGITS = 6  # of a sample's log-probabilities

Step = Callable[[str], None]
"""Told the title of the method that is measured now."""


class Cell(BaseModel, frozen=True, extra="forbid"):
    """One method's number for one answer, and its cost in milliseconds."""

    score: AnswerScore
    milliseconds: float


class Measured(BaseModel, frozen=True, extra="forbid"):
    """Some answers of a batch, by row, measured by one method: their cells, and the samples that its plan drew."""

    method: str
    cells: dict[int, Cell]
    plan: str
    samples: dict[int, SampleSet]

    @property
    def key(self) -> str:
        """Unique in the record of a batch."""
        return f"{self.method} {sorted(self.cells)}"


class Part:
    """The record of the batch that is being measured; a context manager. Without a path nothing is written."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._record: JobRecord[Measured] | None = None
        self._cells: dict[tuple[str, int], Cell] = {}
        self._samples: dict[tuple[str, int], SampleSet] = {}

    @classmethod
    def beside(cls, record: Path, settings: Mapping[str, Any]) -> Part:
        """The part of the run whose record is at this path."""
        return cls(record.with_name(record.name + ".part"), settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def begin(self, keys: Sequence[str], token_ids: Sequence[Sequence[int]]) -> None:
        """Resume if the record is about these very answers, or begin anew."""
        self._close()
        self._cells, self._samples = {}, {}
        if self._path is None:
            return
        settings = {**self._settings, "keys": list(keys), "token_ids": list(map(list, token_ids))}
        try:
            self._record = JobRecord(self._path, settings, Measured, kind="measurements")
        except (BindingMismatchError, InputError):
            self._path.unlink(missing_ok=True)
            self._record = JobRecord(self._path, settings, Measured, kind="measurements")
        for row in self._record.rows.values():
            self._take(row)

    def cell(self, method: str, row: int) -> Cell | None:
        """The cell of a method and a row, if it is measured already."""
        return self._cells.get((method, row))

    def samples(self, plan: Any, row: int) -> SampleSet | None:
        """The samples that a plan drew for a row, if it has."""
        return self._samples.get((repr(plan), row))

    def keep(self, method: str, cells: Mapping[int, Cell], plan: Any, samples: Mapping[int, SampleSet]) -> None:
        """Add some rows of a method, and the samples that its plan drew for them."""
        row = Measured(method=method, cells=dict(cells), plan=repr(plan), samples=dict(samples))
        self._take(row)
        if self._record is not None:
            self._record.append([row])

    def end(self) -> None:
        """The run is whole: remove the record of its last batch."""
        self._close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _take(self, measured: Measured) -> None:
        self._cells.update({(measured.method, row): cell for row, cell in measured.cells.items()})
        self._samples.update({(measured.plan, row): samples for row, samples in measured.samples.items()})

    def _close(self) -> None:
        if self._record is not None:
            self._record.__exit__()
            self._record = None


def measure(
    answers: Sequence[Evidence],
    estimators: Mapping[str, Estimator],
    part: Part,
    *,
    plans: Mapping[Any, float],
    sampled: Sequence[int] | None = None,
    sample_batch: int | None = None,
    on_step: Step | None = None,
) -> tuple[list[dict[str, Cell]], list[tuple[SampleSet, ...]]]:
    """For every answer each method's cell, by name, and the samples of each plan, at the temperature in `plans`.

    Method after method, since a batch shares work among its rows; those that draw samples take `sample_batch`
    answers at a time (None: all), and only the rows `sampled` (None: all): the others have no cell of theirs. Cells
    `part` knows is not measured again. What several methods need (samples, a replay, an observation) is done before
    the first of them, and its time counts for each.
    """
    asking = [list(group) for group in _groups(answers, sampled, sample_batch)]
    whole = [list(enumerate(answers))]
    measured: list[dict[str, Cell]] = [{} for _ in answers]
    common: dict[tuple[Hashable, int], float] = {}
    for name in observing_first(estimators):
        estimator = estimators[name]
        if on_step is not None:
            on_step(estimator.title)
        for group in asking if isinstance(estimator, AskingEstimator) else whole:
            plan = getattr(estimator, "plan", None)
            cells = {row: cell for row, _ in group if (cell := part.cell(name, row)) is not None}
            if new := [(row, evidence) for row, evidence in group if row not in cells]:
                cells |= _cells(estimator, new, plans, common)
                drawn = [
                    (row, evidence) for row, evidence in group if plan in plans and part.samples(plan, row) is None
                ]
                sets = {row: _samples(evidence, plan, plans[plan]) for row, evidence in drawn if evidence.response_ids}
                part.keep(
                    name, cells, plan, {row: sample_set for row, sample_set in sets.items() if sample_set is not None}
                )
            for row, cell in cells.items():
                measured[row][name] = cell
    found = [[part.samples(plan, row) for plan in plans] for row in range(len(answers))]
    samples = [tuple(sample_set for sample_set in row if sample_set is not None) for row in found]
    return [{name: row[name] for name in estimators if name in row} for row in measured], samples


def price_of_samples(estimators: Sequence[Estimator], *, sampled: int, questions: int) -> str | None:
    """The cost of the methods that draw samples, in further answers; None without such a method.

    `sampled` of all `questions` take part.
    """
    asking = [estimator for estimator in estimators if isinstance(estimator, AskingEstimator)]
    plans = {getattr(estimator, "plan", None) for estimator in asking} - {None}
    answers = sum(int(plan.count) for plan in plans if plan is not None)
    if not answers:
        return None
    reading = next((estimator for estimator in asking if isinstance(estimator, MutualInformation)), None)
    more = "" if reading is None else f", and {reading.title} reads each of {reading.plan.count} after each other"
    who = "every question" if sampled == questions else f"{sampled:,} of the {questions:,} questions"
    draw = f"{', '.join(estimator.title for estimator in asking)} draw{'s' if len(asking) == 1 else ''}"
    return (
        f"{draw} {answers} more answers to {who}{more}. Choose others with --methods, or fewer questions with --limit."
    )


def _cells(
    estimator: Estimator,
    rows: Sequence[tuple[int, Evidence]],
    plans: Mapping[Any, float],
    common: dict[tuple[Hashable, int], float],
) -> dict[int, Cell]:
    """One method's cells; `common` keeps the milliseconds an answer of what others need as well, by its first row."""
    name, work = _needed(estimator, plans)
    answers, key = [evidence for _, evidence in rows], (name, rows[0][0])
    if key not in common:
        common[key] = timed(lambda: [work(evidence) for evidence in answers])[1] / len(answers)
    scores, own = timed(lambda: [estimator(evidence) for evidence in answers])
    milliseconds = round(common[key] + own / len(answers), 3)
    cells = [Cell(score=kept_score(score), milliseconds=milliseconds) for score in scores]
    return {row: cell for (row, _), cell in zip(rows, cells, strict=True)}


def _needed(estimator: Estimator, plans: Mapping[Any, float]) -> tuple[Hashable, Callable[[Evidence], object]]:
    """What a method needs as others do: its name among such things, and the work for an answer."""
    plan = getattr(estimator, "plan", None)
    if plan in plans:
        return plan, lambda evidence: _samples(evidence, plan, plans[plan]) if evidence.response_ids else None
    if isinstance(estimator, ObservedEstimator):
        return ObservedEstimator, lambda evidence: evidence.observed()
    if isinstance(estimator, ReplayEstimator):
        return estimator.objective, lambda evidence: evidence.gradients(estimator.objective)
    return estimator, lambda _: None


def _samples(evidence: Evidence, plan: Any, temperature: float) -> SampleSet | None:
    """The samples of a plan for an answer; None if they cannot be scored, as the method's cell tells."""
    try:
        drawn = evidence.samples(plan, temperature=temperature)
    except DetachedRecordError:  # a fault of the program, not of the answer
        raise
    except ScoringError:
        return None
    return SampleSet(
        plan={"kind": type(plan).__name__, **plan_record(plan)},
        temperature=temperature,
        texts=tuple(sample.text for sample in drawn),
        log_probs=tuple(
            tuple(round(value, _DIGITS) if math.isfinite(value) else None for value in sample.log_probs)
            for sample in drawn
        ),
    )


def _groups(
    answers: Sequence[Evidence], rows: Sequence[int] | None, size: int | None
) -> Iterator[Sequence[tuple[int, Evidence]]]:
    """The rows, so many at a time, each group a batch of its own; the batch itself where that is all of it."""
    wanted = range(len(answers)) if rows is None else rows
    most = size or len(answers)
    for start in range(0, len(wanted), most):
        some = wanted[start : start + most]
        whole = len(some) == len(answers)
        group = answers if whole else BatchScoring.joined([answers[row] for row in some]).evidence
        yield list(zip(some, group, strict=True))
