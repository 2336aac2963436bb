"""How honest P(correct) is: expected calibration error, Brier score and the reliability diagram's bins.

An uncertainty is not a probability. It becomes one by the maps that a calibration uses, fitted here on four fifths of
the answers and applied to the last fifth, in turn, so that no answer's own label made its P(correct).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration.confidence import ConfidenceMethod, fit
from semgrad_guard.calibration.exact_tests import upper_bound
from semgrad_guard.evaluation.metrics.ranking import (
    RESAMPLES,
    Clusters,
    Estimate,
    Floats,
    as_arrays,
    divide,
    estimate,
    resamples,
)

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


def crossfitted(
    uncertainties: Sequence[float | None],
    correct: Sequence[bool],
    *,
    method: ConfidenceMethod = "isotonic",
) -> Floats:
    """[answers] P(correct) from a map that was fitted without the answer; nan where it has no score.

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
        to_confidence = fit(scores[others], labels[others], method)
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
