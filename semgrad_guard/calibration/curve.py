"""Risk against coverage of a calibration's answers, threshold by threshold: for people who choose one by looking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semgrad_guard.calibration.calibration_record import Calibration


@dataclass(frozen=True)
class CurvePoint:
    """The share of a calibration's answers that a threshold lets through, and their risk.

    `coverage` is their share among all its questions, `risk` the error rate among them as its confidence map has it;
    both in [0, 1]. They describe these answers and promise nothing; the calibration's own threshold does.
    """

    threshold: float
    coverage: float
    risk: float


def risk_curve(calibration: Calibration, *, points: int = 100) -> tuple[CurvePoint, ...]:
    """Points of rising threshold, at quantiles of the calibration's scores; none where it has no scores.

    The calibration's own threshold is among them. A record holds no labels, so the risk is the mean of
    1 - P(correct): for an isotonic map this is the error rate, up to its rounding towards one half. By sentence there
    are no points: the scores are those of answers, and P(correct) that of a sentence.
    """
    if calibration.sentences is not None:
        return ()
    known = [right for score in calibration.scores if (right := calibration.confidence(score)) is not None]
    if not known:
        return ()
    scores, wrong = np.asarray(calibration.scores[: len(known)], dtype=np.float64), 1 - np.array(known)
    levels = np.quantile(scores, np.linspace(0, 1, points), method="inverted_cdf")
    own = [] if calibration.threshold is None else [calibration.threshold]
    thresholds = np.unique(np.append(levels, own))
    answered = np.searchsorted(scores, thresholds, side="right")
    risks = np.concatenate(([0.0], np.cumsum(wrong)))[answered] / np.maximum(answered, 1)
    return tuple(
        CurvePoint(float(threshold), int(count) / calibration.n, float(risk))
        for threshold, count, risk in zip(thresholds, answered, risks, strict=True)
    )
