"""Everything the tables print about a run, computed once: every metric of every method with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from semgrad_guard.metrics import Floats, Tally
from semgrad_guard.paper import published
from semgrad_guard.paper.graded import GradedRun
from semgrad_guard.paper.guarantee import ALPHAS, SPLITS, GuaranteedCoverage, fewest_questions, guaranteed_coverage
from semgrad_guard.paper.intervals import (
    RESAMPLES,
    Estimate,
    Metric,
    Resampling,
    bootstrap,
    brier,
    combined,
    crossfitted,
    expected_calibration_error,
    paired_difference,
)

COVERAGES = (0.3, 0.5, 0.7, 0.9)
AUROC: Mapping[str, Metric] = {"auroc": Tally.auroc}
COMPARED: Mapping[str, Metric] = {"auroc": Tally.auroc, "aurc": Tally.aurc}
QUALITY: Mapping[str, Metric] = {
    **COMPARED,
    "prr": Tally.prr,
    **{f"accuracy at {coverage:g}": partial(Tally.accuracy_at, coverage=coverage) for coverage in COVERAGES},
}

Scores = Sequence[float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class MethodSummary:
    """One method on one run.

    `quality` has "auroc", "aurc", "prr" and "accuracy at 0.5" (and so on); `difference` "auroc" and "aurc" minus
    HybridGrad's, on the answers that both have scored (empty where HybridGrad is not there); `brier` and `ece` are of
    the cross-fitted P(correct), `confidence` [answers]; `guaranteed` is keyed by alpha, None where there is nothing to
    split; `unscored` counts the answers without a score. Shares are of the questions that were put to the method.
    """

    quality: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]
    confidence: Floats
    brier: Estimate
    ece: Estimate
    guaranteed: Mapping[float, GuaranteedCoverage | None]
    unscored: int


@dataclass(frozen=True)
class RunSummary:
    """A run and its figures. AUROC by `ablations` (variant), `graders` (grader -> method) and `kinds` (kind ->
    method); `run_time` in milliseconds in addition to plain generation, `generation` that of plain generation (None
    where it was not recorded)."""

    run: GradedRun
    methods: Mapping[str, MethodSummary]
    ablations: Mapping[str, Estimate]
    graders: Mapping[str, Mapping[str, Estimate]]
    kinds: Mapping[str, Mapping[str, Estimate]]
    run_time: Mapping[str, Estimate]
    generation: Estimate | None

    @property
    def alphas(self) -> list[float]:
        """The error rates whose promise was measured."""
        return list(next(iter(self.methods.values())).guaranteed)


def summarize(run: GradedRun, *, count: int = RESAMPLES, splits: int = SPLITS) -> RunSummary:
    """Measure a run, by `count` bootstrap resamples and, for coverage at a guaranteed error rate, so many `splits`."""
    drawn = Resampling(run.data, count, clusters=run.clusters)
    everything = range(run.n)

    def auroc(scores: Scores, correct: Sequence[bool], rows: Sequence[int] = everything, data: str = "") -> Estimate:
        """The AUROC on some of the rows, which are a data set of their own if it is named."""
        part = drawn.of(rows) if not data else replace(drawn.of(rows), data=data)
        return bootstrap(AUROC, _at(scores, rows), _at(correct, rows), part)["auroc"]

    def mean_time(milliseconds: Sequence[float]) -> Estimate:
        times, own = np.asarray(milliseconds, dtype=np.float64), replace(drawn, clusters=())
        return own.estimate(len(times), lambda weights: weights @ times / len(times))

    methods: dict[str, MethodSummary] = {}
    ours: Mapping[str, Estimate] | None = None
    for title in sorted(published.in_order(run.scores), key=lambda method: method != published.OURS):
        rows = run.put_to(title)
        scores, correct = _at(run.scores[title], rows), _at(run.correct, rows)
        quality = bootstrap(QUALITY, scores, correct, drawn.of(rows))
        ours = quality if title == published.OURS else ours
        confidence = crossfitted(run.scores[title], run.correct)
        methods[title] = MethodSummary(
            quality=quality,
            difference={} if ours is None else _difference(run, title, quality, ours, drawn),
            confidence=confidence,
            brier=brier(confidence, run.correct, drawn),
            ece=expected_calibration_error(confidence, run.correct, drawn),
            guaranteed={
                alpha: None if run.clusters else guaranteed_coverage(scores, correct, alpha=alpha, splits=splits)
                for alpha in ALPHAS
            },
            unscored=sum(score is None for score in run.scores[title]),
        )
    titles = published.in_order(run.scores)
    kinds = {
        kind: [row for row, found in enumerate(run.kinds) if found == kind]
        for kind in sorted({kind for kind in run.kinds if kind is not None})
    }
    return RunSummary(
        run=run,
        methods={title: methods[title] for title in titles},
        ablations={name: auroc(scores, run.correct) for name, scores in run.ablations.items()},
        graders={
            grader: {title: auroc(run.scores[title], labels) for title in titles}
            for grader, labels in run.other_graders.items()
        },
        kinds={
            kind: {title: auroc(run.scores[title], run.correct, rows, f"{run.data}, {kind}") for title in titles}
            for kind, rows in kinds.items()
        },
        run_time={
            title: mean_time([time for time in run.milliseconds[title] if time is not None])
            for title in published.in_order(run.milliseconds)
        },
        generation=mean_time(run.generation_ms) if run.generation_ms else None,
    )


def _difference(
    run: GradedRun, title: str, quality: Mapping[str, Estimate], ours: Mapping[str, Estimate], drawn: Resampling
) -> dict[str, Estimate]:
    """Minus HybridGrad's; the replicates are there already where no score is missing."""
    mine, theirs = run.scores[title], run.scores[published.OURS]
    if None in mine or None in theirs:
        return paired_difference(COMPARED, mine, theirs, run.correct, drawn)
    return {name: combined([quality[name], ours[name]], [1.0, -1.0]) for name in COMPARED}


def _at(column: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [column[row] for row in rows]


@dataclass(frozen=True)
class Promised:
    """For one alpha, the coverage of HybridGrad and that of the best method.

    `needs` is the number of questions that it takes to promise this at all, if the run has fewer.
    """

    alpha: float
    ours: float | None
    best: str
    best_coverage: float
    needs: int | None


@dataclass(frozen=True)
class Standing:
    """Methods by the interval of their AUROC's difference to HybridGrad's: above zero, below it, or holding it."""

    better: list[str]
    worse: list[str]
    undecided: list[str]


def standing(summary: RunSummary) -> Standing | None:
    """Which methods beat HybridGrad's AUROC on a run, which it beats, and which are too close to tell."""
    found = Standing([], [], [])
    for method, entry in summary.methods.items():
        difference = entry.difference.get("auroc")
        if method == published.OURS or difference is None or difference.value is None or difference.low is None:
            continue
        if not difference.excludes_zero:
            found.undecided.append(method)
        else:
            (found.better if difference.value > 0 else found.worse).append(method)
    return found if found.better or found.worse or found.undecided else None


def promises(summary: RunSummary) -> list[Promised]:
    """One entry per alpha; none for a single question, which cannot be split."""
    found: list[Promised] = []
    for alpha in summary.alphas:
        coverage = {m: g.mean_coverage for m, s in summary.methods.items() if (g := s.guaranteed[alpha]) is not None}
        if coverage:
            best = max(coverage, key=lambda method: (coverage[method], method == published.OURS))
            needed = fewest_questions(alpha=alpha)
            needs = needed if summary.run.n < needed else None
            found.append(Promised(alpha, coverage.get(published.OURS), best, coverage[best], needs))
    return found
