"""Everything the tables print about a run, computed once: every metric of every method with its interval.

Intervals of metrics by resampling, and how honest P(correct) is: expected calibration error, Brier score and the
reliability diagram's bins.

**Intervals** by resampling questions, and paired differences on the same resamples, are seeded. Questions are drawn
with replacement, right and wrong ones alike (not stratified: a new set of questions would have another number of right
ones). Intervals are percentile intervals of the replicates. Resamples in which a metric is undefined (all right, or all
wrong) are left out; if they are more than a tenth, the estimate has none. The sentences of one answer are not
independent: with `clusters`, the numbers of their answers, whole answers are drawn.

**An uncertainty is not a probability.** It becomes one by the maps that a calibration uses, fitted here on four fifths
of the answers and applied to the last fifth, in turn, so that no answer's own label made its P(correct).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration.gates import upper_bound
from semgrad_guard.calibration.thresholds import fit_isotonic
from semgrad_guard.metrics import Floats, Ints, Tally, as_arrays, divide, tally
from semgrad_guard.paper.coverage import ALPHAS, SPLITS, GuaranteedCoverage, fewest_questions, guaranteed_coverage
from semgrad_guard.paper.results import OURS, GradedRun, in_order

RESAMPLES = 1000
LEVEL = 0.95
_BLOCK = 2_000_000
"""Entries of a weight matrix that are handled at once: resamples x answers."""

Metric = Callable[[Tally], Floats]


@dataclass(frozen=True)
class Resampling:
    """How questions are drawn with replacement, `count` times.

    The draw depends on the seed, the number of questions and the name of the `data` alone: all methods meet the same
    resamples, and so do several models on the same questions, whose answers are not independent of each other.
    `clusters` has for each row the number of the answer that it is a sentence of; without it, rows are answers.
    """

    data: str = ""
    count: int = RESAMPLES
    seed: int = 0
    clusters: Sequence[int] = ()

    def weights(self, n: int) -> Iterator[Ints]:
        """Blocks of weights [some resamples, n]: how often each of n rows is drawn; of questions, a row sums to n."""
        if self.clusters:
            names, places = np.unique(np.asarray(self.clusters), return_inverse=True)
            for weights in replace(self, clusters=()).weights(len(names)):
                yield weights[:, places]
            return
        rng = np.random.default_rng([self.seed, n, zlib.crc32(self.data.encode(errors="backslashreplace"))])
        rows = max(1, _BLOCK // n)
        for start in range(0, self.count, rows):
            size = min(rows, self.count - start)
            drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
            yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)

    def of(self, rows: Sequence[int]) -> Resampling:
        """The same for some of the rows."""
        return replace(self, clusters=[self.clusters[row] for row in rows] if self.clusters else ())

    def estimate(self, n: int, measure: Callable[[Floats], Floats]) -> Estimate:
        """A figure of n rows with its interval; `measure` reads it off weights [resamples, n]."""
        whole = float(measure(np.ones((1, n)))[0])
        return estimate(whole, np.concatenate([measure(weights.astype(np.float64)) for weights in self.weights(n)]))


ONCE = Resampling()


@dataclass(frozen=True)
class Estimate:
    """A number with its interval: `value` None where it is undefined, `low` and `high` where the interval is.

    `replicates` are the bootstrap's (nan where undefined), for means and differences of several estimates.
    """

    value: float | None
    low: float | None
    high: float | None
    replicates: Floats

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero: a difference that is more than chance."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def bootstrap(
    metrics: Mapping[str, Metric],
    uncertainties: Sequence[float | None],
    correct: Sequence[bool],
    drawn: Resampling = ONCE,
) -> dict[str, Estimate]:
    """Rank metrics (`Tally.auroc`, `Tally.aurc`, ...) of one method with their intervals, from one set of resamples."""
    whole = tally(uncertainties, correct)
    counts = [tally(uncertainties, correct, weights) for weights in drawn.weights(len(correct))]
    return {
        name: estimate(float(metric(whole)[0]), np.concatenate([metric(counted) for counted in counts]))
        for name, metric in metrics.items()
    }


def paired_difference(
    metrics: Mapping[str, Metric],
    one: Sequence[float | None],
    other: Sequence[float | None],
    correct: Sequence[bool],
    drawn: Resampling = ONCE,
) -> dict[str, Estimate]:
    """metric(one) - metric(other) on the answers that both have scored, resampled together.

    An answer without one of the two scores is left out of both, or the metrics would be of different questions.
    """
    pairs = [(None, None) if None in pair else pair for pair in zip(one, other, strict=True)]
    first, second = (bootstrap(metrics, [pair[i] for pair in pairs], correct, drawn) for i in (0, 1))
    return {name: combined([first[name], second[name]], [1.0, -1.0]) for name in metrics}


def combined(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """The weighted sum of estimates (a mean, a difference), replicate by replicate; undefined where one of them is."""
    value = sum((w * (math.nan if e.value is None else e.value) for e, w in zip(estimates, weights, strict=True)), 0.0)
    replicates = sum((w * e.replicates for e, w in zip(estimates, weights, strict=True)), np.zeros(1))
    return estimate(value, replicates)


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of estimates; undefined where one of them is."""
    return combined(estimates, [1.0 / len(estimates)] * len(estimates))


def known(value: float) -> Estimate:
    """A figure without an interval: someone else's, or a count."""
    return Estimate(value, None, None, np.full(1, math.nan))


def estimate(value: float, replicates: Floats) -> Estimate:
    """A value and the percentile interval of its replicates; nan counts as undefined."""
    if not math.isfinite(value):
        return Estimate(None, None, None, replicates)
    defined = replicates[np.isfinite(replicates)]
    if len(defined) < 0.9 * len(replicates):
        return Estimate(value, None, None, replicates)
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), replicates)


FOLDS = 5
BINS = 10


@dataclass(frozen=True)
class Reliability:
    """The answers by P(correct), in ten bins of equal width; empty bins are left out. One entry per bin.

    `confidence` is the mean P(correct) in the bin, `accuracy` the share of right answers, `low` and `high` its exact
    (Clopper-Pearson) 95 % interval, `count` the number of answers.
    """

    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    count: NDArray[np.int64]


def crossfitted(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> Floats:
    """[answers] P(correct) by isotonic regression without the answer itself; nan where it has no score.

    All nan with fewer answers with a score than folds: nothing could be fitted.
    """
    scores, labels = as_arrays(uncertainties, correct)
    found = np.full(len(scores), np.nan)
    rows = np.random.default_rng(0).permutation(np.flatnonzero(np.isfinite(scores)))
    if len(rows) < FOLDS:
        return found
    for fold in range(FOLDS):
        held_out = rows[fold::FOLDS]
        others = np.setdiff1d(rows, held_out)
        to_confidence = fit_isotonic(scores[others], labels[others])
        found[held_out] = [to_confidence(score) for score in scores[held_out].tolist()]
    return found


def brier(confidence: Floats, correct: Sequence[bool], drawn: Resampling = ONCE) -> Estimate:
    """Mean squared difference of P(correct) and the grade (0 or 1), in [0, 1], lower is better; scored answers only."""
    scored, right = np.isfinite(confidence), np.asarray(correct, dtype=np.float64)
    squares = np.where(scored, (confidence - right) ** 2, 0.0)
    return drawn.estimate(len(right), lambda weights: divide(weights @ squares, weights @ scored.astype(np.float64)))


def expected_calibration_error(confidence: Floats, correct: Sequence[bool], drawn: Resampling = ONCE) -> Estimate:
    """Mean |accuracy - P(correct)| over ten bins of equal width, weighted by their answers; in [0, 1], lower better.

    It is never quite 0 in a finite sample, even for perfect probabilities.
    Source: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    scored, right = np.isfinite(confidence), np.asarray(correct, dtype=np.float64)
    member = np.eye(BINS + 1)[_bins(confidence)][:, :BINS]
    gaps = member * np.where(scored, right - confidence, 0.0)[:, None]

    def measure(weights: Floats) -> Floats:
        return divide(np.abs(weights @ gaps).sum(axis=1), (weights @ member).sum(axis=1))

    return drawn.estimate(len(right), measure)


def reliability(confidence: Floats, correct: Sequence[bool]) -> Reliability:
    """The points of a reliability diagram."""
    bins, right = _bins(confidence), np.asarray(correct, dtype=np.bool_)
    used = [b for b in range(BINS) if (bins == b).any()]
    count = np.array([(bins == b).sum() for b in used], dtype=np.int64)
    hits = np.array([right[bins == b].sum() for b in used], dtype=np.int64)
    means = np.array([confidence[bins == b].mean() for b in used], dtype=np.float64)
    counts = list(zip(hits.tolist(), count.tolist(), strict=True))
    low = np.array([1.0 - upper_bound(n - k, n, delta=0.025) for k, n in counts], dtype=np.float64)
    high = np.array([upper_bound(k, n, delta=0.025) for k, n in counts], dtype=np.float64)
    return Reliability(means, hits / np.maximum(count, 1), low, high, count)


def _bins(confidence: Floats) -> NDArray[np.int64]:
    """The bin of each answer; BINS for those without a P(correct)."""
    scored = np.isfinite(confidence)
    inside = np.minimum((np.where(scored, confidence, 0.0) * BINS).astype(np.int64), BINS - 1)
    return np.where(scored, inside, BINS)


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
    titles, everything = in_order(run.scores), range(run.n)

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
    compared = titles if OURS in titles else []
    differences = {title: _difference(run, title, quality, drawn) for title in compared}
    for name in COMPARED:
        measured[f"{name} difference"] = {title: found[name] for title, found in differences.items()}
    measured["brier"] = {title: brier(found, run.correct, drawn) for title, found in confidence.items()}
    measured["ece"] = {
        title: expected_calibration_error(found, run.correct, drawn) for title, found in confidence.items()
    }
    timed = in_order(run.milliseconds)
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
    mine, theirs = run.scores[title], run.scores[OURS]
    if None in mine or None in theirs:
        return paired_difference(COMPARED, mine, theirs, run.correct, drawn)
    return {name: combined([quality[title][name], quality[OURS][name]], [1.0, -1.0]) for name in COMPARED}


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
        if method == OURS or difference.value is None or difference.low is None:
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
            best = max(coverage, key=lambda method: (coverage[method], method == OURS))
            needed = fewest_questions(alpha=alpha)
            needs = needed if summary.run.n < needed else None
            found.append(Promised(alpha, coverage.get(OURS), best, coverage[best], needs))
    return found
