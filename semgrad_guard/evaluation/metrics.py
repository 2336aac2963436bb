"""How well uncertainties tell right from wrong: AUROC, selective risk and the area under it. numpy only.

Everywhere, higher uncertainty means less certain, None (or a value that is not finite) means that an answer has no
score, and ties are treated as if broken at random, in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.errors import InputError

Floats = NDArray[np.float64]


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
    scores, right, _ = _scored(uncertainties, correct)
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    if not n_right or not n_wrong:
        return None
    above = _mean_ranks(scores)[~right].sum() - n_wrong * (n_wrong + 1) / 2
    return float(above / (n_right * n_wrong))


def risk_coverage(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> RiskCoverage:
    """The risk-coverage curve, from the most certain answer upward."""
    scores, right, n = _scored(uncertainties, correct)
    order = np.argsort(scores, kind="stable")
    _, group, sizes = np.unique(scores[order], return_inverse=True, return_counts=True)
    wrong_share = np.bincount(group, weights=(~right[order]).astype(np.float64)) / np.maximum(sizes, 1)
    answered = np.arange(1, len(scores) + 1, dtype=np.float64)
    return RiskCoverage(answered / n, np.cumsum(wrong_share[group]) / answered)


def aurc(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> float | None:
    """Mean selective risk over all coverages that scored answers reach (lower is better); None without any.

    Source: Geifman, Uziel & El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.
    """
    curve = risk_coverage(uncertainties, correct)
    return float(curve.risk.mean()) if len(curve.risk) else None


def _mean_ranks(values: Floats) -> Floats:
    """Ranks from 1, tied values sharing the mean of theirs."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2.0)[group]


def _scored(uncertainties: Iterable[float | None], correct: Iterable[bool]) -> tuple[Floats, NDArray[np.bool_], int]:
    """(finite scores, their labels, number of all answers)."""
    scores = np.array([math.nan if u is None else float(u) for u in uncertainties], dtype=np.float64)
    labels = np.array([bool(label) for label in correct], dtype=np.bool_)
    if len(scores) != len(labels):
        raise InputError(f"there are {len(scores)} uncertainties and {len(labels)} labels; pass one of each per answer")
    if not len(scores):
        raise InputError("there are no answers to measure")
    finite = np.isfinite(scores)
    return scores[finite], labels[finite], len(scores)
