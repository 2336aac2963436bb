"""Everything the tables print about a run, computed once: every metric of every method with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.graded.graded_run import GradedRun
from semgrad_guard.evaluation.metrics.bootstrap import (
    Estimate,
    Metric,
    bootstrap,
    combined,
    estimate,
    paired_difference,
    resamples,
)
from semgrad_guard.evaluation.metrics.confidence_quality import brier, crossfitted, expected_calibration_error
from semgrad_guard.evaluation.metrics.guarantee import ALPHAS, SPLITS, GuaranteedCoverage, guaranteed_coverage
from semgrad_guard.evaluation.metrics.tally import Floats, Tally

COVERAGES = (0.3, 0.5, 0.7, 0.9)
AUROC: Mapping[str, Metric] = {"auroc": Tally.auroc}
COMPARED: Mapping[str, Metric] = {"auroc": Tally.auroc, "aurc": Tally.aurc}
QUALITY: Mapping[str, Metric] = {
    **COMPARED,
    "prr": Tally.prr,
    **{f"accuracy at {coverage:g}": partial(Tally.accuracy_at, coverage=coverage) for coverage in COVERAGES},
}

Scores = Sequence[float | None]
Report = Callable[[str], object]


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
    method); `run_time` in milliseconds beside plain generation, `generation` that of plain generation (None where it
    was not recorded)."""

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


def summarize(
    run: GradedRun,
    *,
    count: int = 1000,
    splits: int = SPLITS,
    alphas: Sequence[float] = ALPHAS,
    tell: Report = lambda _: None,
) -> RunSummary:
    """Measure a run.

    Args:
        run: the graded answers.
        count: bootstrap resamples.
        splits: halves for the coverage at a guaranteed error rate.
        alphas: the error rates that are promised, each in (0, 1).
        tell: called with what is being measured, for a progress display.
    """
    methods: dict[str, MethodSummary] = {}
    ours: dict[str, Estimate] | None = None
    for title in sorted(paper.in_order(run.scores), key=lambda method: method != paper.OURS):
        tell(f"{run.title}: {title}")
        scores, correct = _put_to(run, title)
        quality = bootstrap(QUALITY, scores, correct, data=run.data, count=count)
        ours = quality if title == paper.OURS else ours
        methods[title] = _method(run, title, quality, ours, count=count, splits=splits, alphas=alphas)
    tell(f"{run.title}: graders, kinds of questions and run times")
    return RunSummary(
        run=run,
        methods={title: methods[title] for title in paper.in_order(methods)},
        ablations={name: _auroc(run, scores, run.correct, count) for name, scores in run.ablations.items()},
        graders={
            grader: {m: _auroc(run, run.scores[m], labels, count) for m in paper.in_order(run.scores)}
            for grader, labels in run.other_graders.items()
        },
        kinds=_by_kind(run, count),
        run_time={m: _run_time(run, m, count) for m in paper.in_order(run.milliseconds)},
        generation=_mean_time(run, run.generation_ms, count) if run.generation_ms else None,
    )


def _method(
    run: GradedRun,
    title: str,
    quality: dict[str, Estimate],
    ours: dict[str, Estimate] | None,
    *,
    count: int,
    splits: int,
    alphas: Sequence[float],
) -> MethodSummary:
    scores = run.scores[title]
    asked, right = _put_to(run, title)
    confidence = crossfitted(scores, run.correct)
    return MethodSummary(
        quality=quality,
        difference={} if ours is None else _difference(run, title, quality, ours, count),
        confidence=confidence,
        brier=brier(confidence, run.correct, data=run.data, count=count),
        ece=expected_calibration_error(confidence, run.correct, data=run.data, count=count),
        guaranteed={a: guaranteed_coverage(asked, right, alpha=a, splits=splits) for a in alphas},
        unscored=sum(score is None for score in scores),
    )


def _put_to(run: GradedRun, title: str) -> tuple[Scores, Sequence[bool]]:
    """The method's scores, and which answers are right, of the questions that were put to it."""
    rows = run.put_to(title)
    return [run.scores[title][row] for row in rows], [run.correct[row] for row in rows]


def _difference(
    run: GradedRun, title: str, quality: dict[str, Estimate], ours: dict[str, Estimate], count: int
) -> dict[str, Estimate]:
    """Minus HybridGrad's; the replicates are there already where no score is missing."""
    mine, theirs = run.scores[title], run.scores[paper.OURS]
    if None in mine or None in theirs:
        return paired_difference(COMPARED, mine, theirs, run.correct, data=run.data, count=count)
    return {name: combined([quality[name], ours[name]], [1.0, -1.0]) for name in COMPARED}


def _by_kind(run: GradedRun, count: int) -> dict[str, dict[str, Estimate]]:
    """AUROC within each kind of question; kinds in alphabetical order."""
    kinds = sorted({kind for kind in run.kinds if kind is not None})
    return {kind: {m: _within(run, run.scores[m], kind, count) for m in paper.in_order(run.scores)} for kind in kinds}


def _within(run: GradedRun, scores: Scores, kind: str, count: int) -> Estimate:
    rows = [row for row, found in enumerate(run.kinds) if found == kind]
    data = f"{run.data}, {kind}"
    return bootstrap(AUROC, [scores[i] for i in rows], [run.correct[i] for i in rows], data=data, count=count)["auroc"]


def _auroc(run: GradedRun, scores: Scores, correct: Sequence[bool], count: int) -> Estimate:
    return bootstrap(AUROC, scores, correct, data=run.data, count=count)["auroc"]


def _run_time(run: GradedRun, method: str, count: int) -> Estimate:
    """Of the questions that were put to the method."""
    return _mean_time(run, [time for time in run.milliseconds[method] if time is not None], count)


def _mean_time(run: GradedRun, milliseconds: Sequence[float], count: int) -> Estimate:
    times = np.asarray(milliseconds, dtype=np.float64)
    blocks = [weights @ times / len(times) for weights in resamples(len(times), data=run.data, count=count)]
    return estimate(float(times.mean()), np.concatenate(blocks))
