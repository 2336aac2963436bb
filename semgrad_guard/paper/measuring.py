"""The measurements of one batch of answers: every method's score and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.answers.options import plan_record
from semgrad_guard.errors import DetachedRecordError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.gradients import ObservedEstimator, ReplayEstimator
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.questions.run import kept_score, observing_first
from semgrad_guard.questions.run_record import AnswerScore, SampleSet

_DIGITS = 6  # of a sample's log-probabilities


@dataclass(frozen=True)
class Cell:
    """One method's number for one answer, and its cost in milliseconds."""

    score: AnswerScore
    milliseconds: float


def measure(
    answers: Sequence[Evidence],
    estimators: Mapping[str, Estimator],
    *,
    plans: Mapping[Any, float],
    sampled: Sequence[int],
) -> tuple[list[dict[str, Cell]], list[tuple[SampleSet, ...]]]:
    """For every answer each method's cell, by name, and the samples of each plan, at the temperature in `plans`.

    Method after method, since a batch shares work among its rows; those that draw samples take only the rows `sampled`:
    the others have no cell of theirs. What several methods need (samples, a replay, an observation) is
    done before the first of them, and its time counts for each.
    """
    whole = list(enumerate(answers))
    drawing = whole if len(sampled) == len(answers) else _batch_of(answers, sampled)
    measured: list[dict[str, Cell]] = [{} for _ in answers]
    samples: dict[tuple[int, Any], SampleSet | None] = {}
    common: dict[Hashable, float] = {}
    for name in observing_first(estimators):
        estimator = estimators[name]
        rows, plan = drawing if isinstance(estimator, AskingEstimator) else whole, getattr(estimator, "plan", None)
        if not rows:
            continue
        for (row, _), cell in zip(rows, _cells(estimator, [one for _, one in rows], plans, common), strict=True):
            measured[row][name] = cell
        for row, evidence in rows if plan in plans else ():
            if (row, plan) not in samples and evidence.response_ids:
                samples[row, plan] = _samples(evidence, plan, plans[plan])
    kept = [tuple(found for plan in plans if (found := samples.get((row, plan)))) for row in range(len(answers))]
    return [{name: row[name] for name in estimators if name in row} for row in measured], kept


def _cells(
    estimator: Estimator, answers: Sequence[Evidence], plans: Mapping[Any, float], common: dict[Hashable, float]
) -> list[Cell]:
    """One method's cells; `common` keeps the milliseconds an answer of what others need as well."""
    name, work = _needed(estimator, plans)
    if name not in common:
        common[name] = timed(lambda: [work(evidence) for evidence in answers])[1] / len(answers)
    scores, own = timed(lambda: [estimator(evidence) for evidence in answers])
    milliseconds = round(common[name] + own / len(answers), 3)
    return [Cell(score=kept_score(score), milliseconds=milliseconds) for score in scores]


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


def _batch_of(answers: Sequence[Evidence], rows: Sequence[int]) -> list[tuple[int, Evidence]]:
    """Some of the answers, as a batch of their own."""
    joined = BatchScoring.joined([answers[row] for row in rows]).evidence if rows else ()
    return list(zip(rows, joined, strict=True))
