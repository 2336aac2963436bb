"""How well uncertainties tell right from wrong: AUROC, selective risk, the area under it and what it gains.

Everywhere, higher uncertainty means less certain, None (or a value that is not finite) means that an answer has no
score, and ties are treated as if broken at random, in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.metrics.tally import Floats, tally


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
    return _only(tally(uncertainties, correct).auroc())


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
    return _only(tally(uncertainties, correct).aurc())


def prr(uncertainties: Sequence[float | None], correct: Sequence[bool]) -> float | None:
    """Prediction rejection ratio: 1 for an oracle, 0 for random order, negative for worse; None where undefined.

    The area under the risk-coverage curve that is gained over random order, as a share of what an oracle gains on the
    scored answers. None where all of them are right, or all wrong.
    Source: Malinin & Gales, "Uncertainty estimation in autoregressive structured prediction", ICLR 2021.
    """
    return _only(tally(uncertainties, correct).prr())


def accuracy_at(uncertainties: Sequence[float | None], correct: Sequence[bool], *, coverage: float) -> float | None:
    """Expected accuracy of the most certain share `coverage` of all answers; None where fewer have a score."""
    if not 0.0 < coverage <= 1.0:
        raise InputError(f"a coverage lies in (0, 1], it is {coverage}")
    return _only(tally(uncertainties, correct).accuracy_at(coverage))


def _only(values: Floats) -> float | None:
    """The one value; None for nan."""
    return None if math.isnan(values[0]) else float(values[0])
