"""How good uncertainties are: AUROC, selective risk, and the area under it and its gain.

Everywhere, higher uncertainty means less certain, None (or a value that is not finite) means that an answer has no
score, and ties are treated as if broken at random, in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import planning
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
