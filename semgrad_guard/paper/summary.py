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
class RunSummary:
    """A run and its figures, by method; shares are of the questions that were put to the method.

    `measured` has, by measure and method, "auroc", "aurc", "prr", "accuracy at 0.5" (and so on); "auroc" and "aurc
    difference", minus HybridGrad's on the answers that both have scored (of none where HybridGrad is not there);
    "brier" and "ece" of the cross-fitted P(correct), `confidence` [answers]; "auroc by judge" and "auroc within
    history", by the run's other graders and `kinds`; "ablation", the AUROC of SemGrad's variants; and "run time" in
    milliseconds in addition to plain generation, whose own is `generation` (None where it was not recorded).
    `guaranteed` is keyed by alpha too, None where there is nothing to split; `unscored` counts the answers without a
    score.
    """

    run: GradedRun
    measured: Mapping[str, Mapping[str, Estimate]]
    confidence: Mapping[str, Floats]
    guaranteed: Mapping[float, Mapping[str, GuaranteedCoverage | None]]
    unscored: Mapping[str, int]
    kinds: Sequence[str]
    generation: Estimate | None


def summarize(run: GradedRun, *, count: int = RESAMPLES, splits: int = SPLITS) -> RunSummary:
    """Measure a run, by `count` bootstrap resamples and, for coverage at a guaranteed error rate, so many `splits`."""
    drawn = Resampling(run.data, count, clusters=run.clusters)
    titles, everything = published.in_order(run.scores), range(run.n)

    def auroc(scores: Scores, correct: Sequence[bool], rows: Sequence[int] = everything, data: str = "") -> Estimate:
        """The AUROC on some of the rows, which are a data set of their own if it is named."""
        part = drawn.of(rows) if not data else replace(drawn.of(rows), data=data)
        return bootstrap(AUROC, _at(scores, rows), _at(correct, rows), part)["auroc"]

    def mean_time(milliseconds: Sequence[float | None]) -> Estimate:
        times = np.array([time for time in milliseconds if time is not None], dtype=np.float64)
        own = replace(drawn, clusters=())
        return own.estimate(len(times), lambda weights: weights @ times / len(times))

    def guaranteed(title: str, alpha: float) -> GuaranteedCoverage | None:
        scores, correct = _at(run.scores[title], rows[title]), _at(run.correct, rows[title])
        return None if run.clusters else guaranteed_coverage(scores, correct, alpha=alpha, splits=splits)

    rows = {title: run.put_to(title) for title in titles}
    quality = {
        title: bootstrap(QUALITY, _at(run.scores[title], some), _at(run.correct, some), drawn.of(some))
        for title, some in rows.items()
    }
    confidence = {title: crossfitted(run.scores[title], run.correct) for title in titles}
    measured = {name: {title: found[name] for title, found in quality.items()} for name in QUALITY}
    compared = titles if published.OURS in titles else []
    differences = {title: _difference(run, title, quality, drawn) for title in compared}
    for name in COMPARED:
        measured[f"{name} difference"] = {title: found[name] for title, found in differences.items()}
    measured["brier"] = {title: brier(found, run.correct, drawn) for title, found in confidence.items()}
    measured["ece"] = {
        title: expected_calibration_error(found, run.correct, drawn) for title, found in confidence.items()
    }
    timed = published.in_order(run.milliseconds)
    measured["run time"] = {title: mean_time(run.milliseconds[title]) for title in timed}
    kinds = sorted({kind for kind in run.kinds if kind is not None})
    for kind in kinds:
        own = [row for row, found in enumerate(run.kinds) if found == kind]
        measured[f"auroc within {kind}"] = {
            title: auroc(run.scores[title], run.correct, own, f"{run.data}, {kind}") for title in titles
        }
    for grader, labels in run.other_graders.items():
        measured[f"auroc by {grader}"] = {title: auroc(run.scores[title], labels) for title in titles}
    measured["ablation"] = {name: auroc(scores, run.correct) for name, scores in run.ablations.items()}
    return RunSummary(
        run=run,
        measured=measured,
        confidence=confidence,
        guaranteed={alpha: {title: guaranteed(title, alpha) for title in titles} for alpha in ALPHAS},
        unscored={title: sum(score is None for score in run.scores[title]) for title in titles},
        kinds=kinds,
        generation=mean_time(run.generation_ms) if run.generation_ms else None,
    )


def _difference(
    run: GradedRun, title: str, quality: Mapping[str, Mapping[str, Estimate]], drawn: Resampling
) -> dict[str, Estimate]:
    """Minus HybridGrad's; the replicates are there already where no score is missing."""
    mine, theirs = run.scores[title], run.scores[published.OURS]
    if None in mine or None in theirs:
        return paired_difference(COMPARED, mine, theirs, run.correct, drawn)
    return {name: combined([quality[title][name], quality[published.OURS][name]], [1.0, -1.0]) for name in COMPARED}


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
    for method, difference in summary.measured["auroc difference"].items():
        if method == published.OURS or difference.value is None or difference.low is None:
            continue
        if not difference.excludes_zero:
            found.undecided.append(method)
        else:
            (found.better if difference.value > 0 else found.worse).append(method)
    return found if found.better or found.worse or found.undecided else None


def promises(summary: RunSummary) -> list[Promised]:
    """One entry per alpha; none for a single question, which cannot be split."""
    found: list[Promised] = []
    for alpha, guarded in summary.guaranteed.items():
        coverage = {method: found.mean_coverage for method, found in guarded.items() if found is not None}
        if coverage:
            best = max(coverage, key=lambda method: (coverage[method], method == published.OURS))
            needed = fewest_questions(alpha=alpha)
            needs = needed if summary.run.n < needed else None
            found.append(Promised(alpha, coverage.get(published.OURS), best, coverage[best], needs))
    return found
