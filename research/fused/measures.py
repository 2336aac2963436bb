"""How well every way of `fused_fits.py` does on one model: AUROC in several settings, and a promise's coverage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.fused.fits import FITS, Answers, Scores
from semgrad_guard.calibration import calibrate

LABELS = (30, 50, 100, 400, 700)
SPLITS, TESTED, REPLICATES = 20, 500, 400
SHIFT_LABELS = 300
CLOSED = ("known", "rare", "unknown", "several")
BUDGETS, ALPHAS, DELTA = (200, 400, 700), (0.1, 0.2, 0.3), 0.1

PROMISES = {
    "HybridGrad": ("HybridGrad", 0.0),
    "G-NLL": ("G-NLL", 0.0),
    "HybridGrad, 1/4 for the grid": ("HybridGrad", 1 / 4),
    **{f"FusedGrad, 1/{parts} to fit": ("FusedGrad", 1 / parts) for parts in (4, 3, 2)},
    "FusedGrad, all layers x 8 tokens, 1/4 to fit": ("FusedGrad, all layers x 8 tokens", 1 / 4),
}
"""Title -> the way, and the share of the labels that are learned from."""

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Setting:
    """Where to fit and where to test, one pair of rows per split."""

    name: str
    splits: Callable[[Answers], Iterator[tuple[Rows, Rows]]]


def after_labels(n: int) -> Setting:
    """`n` random answers to fit on; the same 500 others to test on, whatever n is."""

    def splits(answers: Answers) -> Iterator[tuple[Any, Any]]:
        for seed in range(SPLITS):
            order = np.random.default_rng(seed).permutation(len(answers.wrong))
            yield order[TESTED:][:n], order[:TESTED]

    return Setting(f"{n} labels", splits)


def shifted(name: str, *, closed_first: bool) -> Setting:
    """Fitted on one kind of question and tested on the other."""

    def splits(answers: Answers) -> Iterator[tuple[Any, Any]]:
        closed = np.array([row["kind"] in CLOSED for row in answers.rows])
        source, target = np.flatnonzero(closed == closed_first), np.flatnonzero(closed != closed_first)
        for seed in range(SPLITS):
            yield np.random.default_rng(seed).permutation(source)[:SHIFT_LABELS], target

    return Setting(name, splits)


SETTINGS = (
    *map(after_labels, LABELS),
    shifted("closed book → reading", closed_first=True),
    shifted("reading → closed book", closed_first=False),
)


@dataclass(frozen=True)
class Measured:
    """One model's figures.

    `aurocs[way, setting]` holds the mean over the splits, [1 + replicates], the first without resampling questions;
    `promises[title, budget, alpha]` (coverage of the tested questions, error rate among those let through) per split.
    """

    aurocs: dict[tuple[str, str], Floats]
    promises: dict[tuple[str, int, float], list[tuple[float, float]]]


def measure(answers: Answers, questions: int) -> Measured:
    """Everything about one model; `questions` is how many there are in all, so that models are resampled alike."""
    draws = np.random.default_rng(0).multinomial(questions, np.full(questions, 1 / questions), size=REPLICATES)
    weights = np.concatenate([np.ones((1, questions)), draws]).astype(np.float64)[:, answers.question]
    aurocs = {(way, s.name): _auroc(answers, s, way, weights) for s in SETTINGS for way in FITS}
    promises: dict[tuple[str, int, float], list[tuple[float, float]]] = {}
    for title, (way, share) in PROMISES.items():
        for budget in BUDGETS:
            for rows, test in after_labels(budget).splits(answers):
                for alpha, outcome in _promise(answers, way, rows, test, share=share):
                    promises.setdefault((title, budget, alpha), []).append(outcome)
    return Measured(aurocs, promises)


def _auroc(answers: Answers, setting: Setting, way: str, weights: Floats) -> Floats:
    found = [
        weighted_auroc(FITS[way](answers, fit_on, test_on), answers.wrong[test_on], weights[:, test_on])
        for fit_on, test_on in setting.splits(answers)
    ]
    return np.mean(found, axis=0)


def weighted_auroc(scores: Scores, wrong: NDArray[np.bool_], weights: Floats) -> Floats:
    """AUROC for every row of `weights` [R, n], ties counting half."""
    _, group = np.unique(scores, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    bad = np.add.reduceat(weights[:, order] * wrong[order], starts, axis=1)
    good = np.add.reduceat(weights[:, order] * ~wrong[order], starts, axis=1)
    below = np.cumsum(good, axis=1) - good / 2
    return (bad * below).sum(1) / np.maximum(bad.sum(1) * good.sum(1), 1e-300)


def _promise(
    answers: Answers, way: str, rows: Rows, test: Rows, *, share: float
) -> Iterator[tuple[float, tuple[float, float]]]:
    """(alpha, (coverage, error rate)), on answers that were not learned from."""
    fit_on, rest = rows[: int(len(rows) * share)], rows[int(len(rows) * share) :]
    values = FITS[way](answers, fit_on if share else rest, np.concatenate([fit_on, rest, test]))
    _, tested, new = np.split(values, [len(fit_on), len(rows)])
    for alpha in ALPHAS:
        found = calibrate(tested, ~answers.wrong[rest], alpha=alpha, delta=DELTA)
        let = new <= (-np.inf if found.threshold is None else found.threshold)
        yield alpha, (float(let.mean()), float(answers.wrong[test][let].mean()) if let.any() else 0.0)
