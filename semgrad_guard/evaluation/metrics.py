"""How good uncertainties are: AUROC, selective risk, the area under it and its gain; and how honest P(correct) is:
expected calibration error, Brier score and the reliability diagram's bins.

Everywhere, higher uncertainty means less certain, None (or a value that is not finite) means that an answer has no
score, and ties are treated as if broken at random, in expectation.

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import planning
from semgrad_guard.calibration.confidence import fit_isotonic
from semgrad_guard.calibration.gates import upper_bound
from semgrad_guard.errors import InputError


@dataclass(frozen=True)
class RiskCoverage:
    """Selective risk (share of errors) when the k most certain of n answers are let through, k = 1, 2, ...

    `coverage[k - 1]` is k / n and `risk[k - 1]` the expected risk there. Answers without a score are never let
    through, so the curve ends at the share that has one.
    """

    coverage: Floats
    risk: Floats


def auroc(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> float | None:
    """P(a wrong answer is less certain than a right one), ties counting half, in [0, 1], over the scored answers.

    None where all of them are right, or all wrong: then there is nothing to tell apart.
    """
    scores, labels = as_arrays(uncertainties, correct)
    scored = np.isfinite(scores)
    return planning.auroc(scores[scored], labels[scored])


def risk_coverage(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> RiskCoverage:
    """The risk-coverage curve, from the most certain answer upward."""
    counts = tally(uncertainties, correct)
    sizes = (counts.wrong + counts.right)[0].astype(np.int64)
    answered = np.arange(1, sizes.sum() + 1, dtype=np.float64)
    errors = np.cumsum(np.repeat(counts.wrong[0] / np.maximum(sizes, 1), sizes))
    return RiskCoverage(answered / counts.n[0], errors / answered)


def aurc(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> float | None:
    """Mean selective risk over all coverages that scored answers reach (lower is better); None without any.

    Source: Geifman, Uziel & El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.
    """
    area = float(tally(uncertainties, correct).aurc()[0])
    return None if math.isnan(area) else area


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """Counts of scored answers at each distinct uncertainty, from the most certain upward.

    `wrong` and `right` are [resamples, levels]; `n` [resamples] counts all answers, those without a score included.
    """

    wrong: Floats
    right: Floats
    n: Floats

    @property
    def scored(self) -> Floats:
        """[resamples] how many answers have a score."""
        return (self.wrong + self.right).sum(axis=1)

    def auroc(self) -> Floats:
        """[resamples] P(a wrong answer is less certain than a right one), ties half; nan where one kind is missing."""
        below = np.cumsum(self.right, axis=1) - self.right / 2
        pairs = self.right.sum(axis=1) * self.wrong.sum(axis=1)
        return divide((self.wrong * below).sum(axis=1), pairs)

    def aurc(self) -> Floats:
        """[resamples] mean selective risk over k = 1 ... scored answers, ties in expectation; nan without any.

        Inside a level the expected errors rise in a straight line, e0 + s (k - k0); the mean of that over k, divided
        by k, is a difference of harmonic numbers.
        """
        size = self.wrong + self.right
        answered, errors = np.cumsum(size, axis=1), np.cumsum(self.wrong, axis=1)
        share = divide(self.wrong, size, where_zero=0.0)
        harmonic = np.concatenate(([0.0], np.cumsum(1.0 / np.arange(1, int(answered.max()) + 1))))  # H(0), H(1), ...
        steps = harmonic[answered.astype(np.int64)] - harmonic[(answered - size).astype(np.int64)]
        before = (errors - self.wrong) - share * (answered - size)
        return divide((before * steps + self.wrong).sum(axis=1), self.scored)

    def error_rate(self) -> Floats:
        """[resamples] the share of wrong answers among the scored ones; nan without any."""
        return divide(self.wrong.sum(axis=1), self.scored)

    def oracle(self) -> Tally:
        """The tally of an oracle that scores the same answers: all right ones first."""
        right, wrong = self.right.sum(axis=1), self.wrong.sum(axis=1)
        none = np.zeros_like(right)
        return Tally(np.stack([none, wrong], axis=1), np.stack([right, none], axis=1), self.n)

    def prr(self) -> Floats:
        """[resamples] prediction rejection ratio: 1 for an oracle, 0 for random order, negative for worse; nan where
        all answers are right, or all wrong.

        The area under the risk-coverage curve that is gained over random order, as a share of an oracle's gain on the
        scored answers.
        Source: Malinin & Gales, "Uncertainty estimation in autoregressive structured prediction", ICLR 2021.
        """
        random = self.error_rate()
        return divide(random - self.aurc(), random - self.oracle().aurc())

    def accuracy_at(self, coverage: float) -> Floats:
        """[resamples] expected accuracy of the most certain ceil(coverage * n); nan where fewer have a score."""
        wanted = np.ceil(coverage * self.n - 1e-9)
        size = self.wrong + self.right
        answered, errors = np.cumsum(size, axis=1), np.cumsum(self.wrong, axis=1)
        rows = np.arange(len(size))
        level = np.minimum((answered < wanted[:, None]).sum(axis=1), size.shape[1] - 1)
        share = divide(self.wrong, size, where_zero=0.0)[rows, level]
        missed = errors[rows, level] - share * (answered[rows, level] - wanted)
        reached = (wanted >= 1) & (wanted <= self.scored)
        return np.where(reached, 1.0 - divide(missed, wanted), math.nan)


def tally(uncertainties: Sequence[float | None], correct: Sequence[bool], weights: Ints | None = None) -> Tally:
    """Count answers by uncertainty.

    Args:
        uncertainties: one per answer, higher = less certain; None, nan and infinities mean that the answer has no
            score.
        correct: one per answer.
        weights: [resamples, answers] how often each answer was drawn; without them one row of ones.
    """
    scores, labels = as_arrays(uncertainties, correct)
    drawn = np.ones((1, len(scores)), dtype=np.int64) if weights is None else weights
    rows = np.flatnonzero(np.isfinite(scores))
    order = rows[np.argsort(scores[rows], kind="stable")]
    n = drawn.sum(axis=1).astype(np.float64)
    if not len(order):
        return Tally(np.zeros((len(drawn), 1)), np.zeros((len(drawn), 1)), n)
    starts = np.flatnonzero(np.diff(scores[order], prepend=-math.inf))
    ranked = drawn[:, order].astype(np.float64)
    wrong = np.add.reduceat(ranked * ~labels[order], starts, axis=1)
    return Tally(wrong, np.add.reduceat(ranked, starts, axis=1) - wrong, n)


def as_arrays(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> tuple[Floats, NDArray[np.bool_]]:
    """(scores with nan for None, labels), of equal length and at least one."""
    scores = np.array([math.nan if u is None else float(u) for u in uncertainties], dtype=np.float64)
    labels = np.array([bool(label) for label in correct], dtype=np.bool_)
    if len(scores) != len(labels):
        raise InputError(f"there are {len(scores)} uncertainties and {len(labels)} labels; pass one of each per answer")
    if not len(scores):
        raise InputError("there are no answers to measure")
    return scores, labels


def divide(numerator: Floats, denominator: Floats, *, where_zero: float = math.nan) -> Floats:
    """The quotient, and `where_zero` where the denominator vanishes (a difference of two equal areas included)."""
    zero = np.abs(denominator) < 1e-12
    return np.where(zero, where_zero, numerator / np.where(zero, 1.0, denominator))


RESAMPLES = 1000
LEVEL = 0.95
_BLOCK = 2_000_000
"""Entries of a weight matrix that are handled at once: resamples x answers."""

Metric = Callable[[Tally], Floats]
Clusters = Sequence[int]
"""For each row the number of the answer that it is a sentence of; none: rows are answers."""


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


def resamples(
    n: int, *, data: str = "", count: int = RESAMPLES, seed: int = 0, clusters: Clusters = ()
) -> Iterator[Ints]:
    """Blocks of weights [some resamples, n]: how often each of n questions is drawn; every row sums to n.

    The draw depends on seed, n and the name of the `data` alone: all methods meet the same resamples, and so do
    several models on the same questions, whose answers are not independent of each other.
    """
    if clusters:
        names, places = np.unique(np.asarray(clusters), return_inverse=True)
        for weights in resamples(len(names), data=data, count=count, seed=seed):
            yield weights[:, places]
        return
    rng = np.random.default_rng([seed, n, zlib.crc32(data.encode(errors="backslashreplace"))])
    rows = max(1, _BLOCK // n)
    for start in range(0, count, rows):
        size = min(rows, count - start)
        drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)


def bootstrap(
    metrics: Mapping[str, Metric],
    uncertainties: Sequence[float | None],
    correct: Sequence[bool],
    *,
    data: str = "",
    count: int = RESAMPLES,
    seed: int = 0,
    clusters: Clusters = (),
) -> dict[str, Estimate]:
    """Rank metrics (`Tally.auroc`, `Tally.aurc`, ...) of one method with their intervals, from one set of resamples."""
    whole = tally(uncertainties, correct)
    blocks: dict[str, list[Floats]] = {name: [] for name in metrics}
    for weights in resamples(len(correct), data=data, count=count, seed=seed, clusters=clusters):
        counted = tally(uncertainties, correct, weights)
        for name, metric in metrics.items():
            blocks[name].append(metric(counted))
    return {name: estimate(float(m(whole)[0]), np.concatenate(blocks[name])) for name, m in metrics.items()}


def paired_difference(
    metrics: Mapping[str, Metric],
    one: Sequence[float | None],
    other: Sequence[float | None],
    correct: Sequence[bool],
    *,
    data: str = "",
    count: int = RESAMPLES,
    seed: int = 0,
    clusters: Clusters = (),
) -> dict[str, Estimate]:
    """metric(one) - metric(other) on the answers that both have scored, resampled together.

    An answer without one of the two scores is left out of both, or the metrics would be of different questions.
    """
    both = [a is not None and b is not None for a, b in zip(one, other, strict=True)]
    first = bootstrap(metrics, _where(one, both), correct, data=data, count=count, seed=seed, clusters=clusters)
    second = bootstrap(metrics, _where(other, both), correct, data=data, count=count, seed=seed, clusters=clusters)
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


def _where(values: Sequence[float | None], kept: Sequence[bool]) -> list[float | None]:
    return [value if keep else None for value, keep in zip(values, kept, strict=True)]


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


def brier(
    confidence: Floats, correct: Sequence[bool], *, data: str = "", count: int = RESAMPLES, clusters: Clusters = ()
) -> Estimate:
    """Mean squared difference of P(correct) and the grade (0 or 1), in [0, 1], lower is better; scored answers only."""
    scored, right = np.isfinite(confidence), np.asarray(correct, dtype=np.float64)
    squares = np.where(scored, (np.where(scored, confidence, 0.0) - right) ** 2, 0.0)
    columns = np.stack([squares, scored.astype(np.float64)], axis=1)
    return _of_sums(columns, lambda sums: divide(sums[:, 0], sums[:, 1]), data=data, count=count, clusters=clusters)


def expected_calibration_error(
    confidence: Floats, correct: Sequence[bool], *, data: str = "", count: int = RESAMPLES, clusters: Clusters = ()
) -> Estimate:
    """Mean |accuracy - P(correct)| over ten bins of equal width, weighted by their answers; in [0, 1], lower better.

    It is never quite 0 in a finite sample, even for perfect probabilities.
    Source: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    scored, right = np.isfinite(confidence), np.asarray(correct, dtype=np.float64)
    member = np.eye(BINS + 1)[_bins(confidence)][:, :BINS]
    gap = np.where(scored, right - np.where(scored, confidence, 0.0), 0.0)
    columns = np.concatenate([member * gap[:, None], member], axis=1)

    def measure(sums: Floats) -> Floats:
        return divide(np.abs(sums[:, :BINS]).sum(axis=1), sums[:, BINS:].sum(axis=1))

    return _of_sums(columns, measure, data=data, count=count, clusters=clusters)


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


def _of_sums(
    columns: Floats, measure: Callable[[Floats], Floats], *, data: str, count: int, clusters: Clusters
) -> Estimate:
    """A function of column sums [resamples, columns], with its interval."""
    value = measure(columns.sum(axis=0, keepdims=True))[0]
    drawn = resamples(len(columns), data=data, count=count, clusters=clusters)
    blocks = [measure(weights.astype(np.float64) @ columns) for weights in drawn]
    return estimate(float(value), np.concatenate(blocks))
