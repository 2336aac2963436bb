"""What an answer yields, by one replay or without any, as named numbers: the material of a learned estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from semgrad_guard.engine.scoring.observation import Observation
from semgrad_guard.engine.scoring.scores import GradientScores
from semgrad_guard.estimators.learned import STATE

GRID = "grid"
"""Begins the names of the gradient grid's cells: `grid/ROW/OFFSET`, see `replay_features`."""


def replay_features(scores: GradientScores) -> Mapping[str, float] | None:
    """The features of one answer, each finite and >= 0; None where a gradient is missing or overflowed.

    `semgrad`, `paragrad`, `mean_entropy`, `gnll` and `mean_nll` (nats) describe the answer, `length` its tokens,
    `first_nll` and `first_entropy` its first token. A cell `grid/ROW/OFFSET` is the mean |gradient| by the hidden state
    of one layer (the span's, counted from 0) at one of the prompt's last tokens (-1 is the last).
    """
    if scores.semgrad is None or scores.paragrad is None or scores.mean_entropy is None or scores.greedy_nll is None:
        return None
    if not scores.grid:
        return None
    features = {
        "semgrad": scores.semgrad,
        "paragrad": scores.paragrad,
        "mean_entropy": scores.mean_entropy,
        "gnll": scores.greedy_nll,
        "mean_nll": scores.greedy_nll / len(scores.log_probs),
        "length": float(len(scores.log_probs)),
        "first_nll": -scores.log_probs[0],
        "first_entropy": scores.entropies[0],
        **_cells(scores.grid),
    }
    # Rounding leaves some of these a hair below zero (-0.0, or an entropy of -1e-17).
    return {name: max(0.0, value) for name, value in features.items()} if _all_finite(features) else None


def observed_features(seen: Observation) -> Mapping[str, float] | None:
    """The features of an answer that was observed; None where there is nothing finite.

    Beside those of `replay_features` that need no gradient: `greatest_entropy` and `greatest_nll` over the answer's
    tokens, and `state/0` to `state/d-1`, the mean hidden state to five digits.
    """
    if seen.greedy_nll is None or seen.mean_entropy is None or not seen.state:
        return None
    likelihoods = {
        "mean_entropy": seen.mean_entropy,
        "gnll": seen.greedy_nll,
        "mean_nll": seen.greedy_nll / len(seen.log_probs),
        "length": float(len(seen.log_probs)),
        "first_nll": -seen.log_probs[0],
        "first_entropy": seen.entropies[0],
        "greatest_entropy": max(seen.entropies),
        "greatest_nll": -min(seen.log_probs),
    }
    state = {f"{STATE}{number}": float(f"{value:.5g}") for number, value in enumerate(seen.state)}
    return {name: max(0.0, value) for name, value in likelihoods.items()} | state


def _cells(grid: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        f"{GRID}/{number}/{column - len(row)}": value
        for number, row in enumerate(grid)
        for column, value in enumerate(row)
    }


def _all_finite(features: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, features.values()))
