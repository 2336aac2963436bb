"""FusedStates: named numbers about an answer, weighed by a logistic regression on graded answers.

Why: docs/decisions.md#0131
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import Observation
from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.own_tokens import OBSERVING, observed_details
from semgrad_guard.records import LOG, FusedWeights, Score

MIN_ANSWERS = 50
"""Fewer graded answers than this are refused (with 30, learned scores are behind likelihoods)."""

MIN_EACH = 8
"""Nor is anything fitted with fewer right, or fewer wrong, answers than this."""

STATE = "own_state/"
"""Begins the names of a hidden state's numbers: `own_state/0`, `own_state/1`, ..."""

ANCHOR = frozenset({"mean_nll", "mean_entropy", "greatest_entropy"})
"""Features whose logarithms, each in standard deviations, add up to the label-free score that learned ones lean on."""

SHARES = (1.0, 0.5, 0.25, 0.0)
"""Weights of the label-free score next to the learned one, both in standard deviations, the greatest first."""

_AS_IS = frozenset({"mean_entropy", "gnll", "mean_nll", "length", "first_nll", "first_entropy"})
"""Features that enter as they are besides their logarithms."""

_STATE_RANGE = 5.0  # a state's number counts up to so many standard deviations from its mean
_DIGITS = 6  # that are kept of a state's weights: calibrations are read, sent and compared

_C = 1.7
"""scikit-learn's: the inverse of the ridge penalty."""

_PLAIN = 1 / 6
"""A standardised column is multiplied by this; one of a state's d numbers by 1 / sqrt(d), so that a wide model's states
weigh no more than a narrow one's."""

_YIELDS = 0.02
"""The learned score leans on the label-free one (`ANCHOR`), which holds for answers of every kind: by one of `SHARES`,
the greatest that costs no more than this of cross-validated AUROC."""

_FOLDS, _REPEATS = 5, 2

Features = Mapping[str, float]
_Vector = NDArray[np.float64]
_Matrix = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class FusedStates:
    """ln P(wrong) / P(correct), any real number, from likelihoods and a middle layer's mean state over the answer.

    The state is averaged over the positions of the answer's own tokens: of a short answer the last one tells most, and
    it predicts nothing that the answer holds. No gradient is computed. Generating has read all of these tokens but the
    last one of an answer that a limit cut off: such an answer takes one more pass.

    The score is the logit and not a probability: thresholds and the drift test need a continuous scale, and P(correct)
    comes from the calibration, as for every estimator. Without `weights` it only collects features (every score is
    None, with the reason); `FusedStates().fitted(records, correct)` scores. The weights mean nothing for another model:
    calibrations bind both. Weights of states are worth little on questions of another kind, so it leans on the
    likelihoods as far as the labels do not speak against it (`_YIELDS`).

    Probes of hidden states: Azaria & Mitchell, "The internal state of an LLM knows when it's lying", 2023. With strong
    shrinkage a hundred labels are enough.
    """

    weights: FusedWeights | None = None
    name: ClassVar[str] = "states"
    title: ClassVar[str] = "FusedStates"

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def settings(self) -> dict[str, Any]:
        """The id of the fitted numbers."""
        return {"weights": None if self.weights is None else self.weights.id}

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = timed(lambda: evidence.observed(own=True))
        if seen is None:
            return Score(None, evidence.why_empty)
        details = observed_details(seen, milliseconds)
        if not seen.state:
            return Score(None, seen.reason or "this architecture's layers are not known, so there is no state", details)
        features = observed_features(seen)
        number, reason = self.uncertainty(features)
        return Score(number, reason, details, features)

    def fitted(self, records: Sequence[Features | None], correct: Sequence[bool]) -> FusedStates:
        """The same estimator, fitted on graded answers; the threshold must be chosen on others, or it promises nothing.

        Args:
            records: each answer's `Score.features`; answers without any, or with one that is not finite, are left out.
            correct: True or False (or 1 or 0) per answer.

        Raises:
            FitError: labels that are neither, fewer than `MIN_ANSWERS` answers with features, fewer than `MIN_EACH`
                right or wrong ones, or no feature that varies.
            MissingExtraError: scikit-learn is not installed.
        """
        if len(records) != len(correct):
            raise FitError(f"There are {len(records)} records and {len(correct)} labels. Pass one of each per answer.")
        if any(label not in (True, False) for label in correct):
            raise FitError("Each label must be True or False (or 1 or 0): grade the answers first.")
        usable = [r is not None and all(map(math.isfinite, r.values())) for r in records]
        wrong = np.array([not right for right, use in zip(correct, usable, strict=True) if use], dtype=np.bool_)
        require_enough(wrong, self.title)
        kept = [r for r, use in zip(records, usable, strict=True) if use and r is not None]
        return replace(self, weights=fit_weights(kept, wrong))

    def uncertainty(self, features: Features | None) -> tuple[float | None, str | None]:
        """The score for an answer's features, or None and the reason."""
        if self.weights is None:
            return None, f"{self.title} is not fitted: run `semgrad-guard calibrate --estimator {self.name}`"
        if features is None:
            return None, "the score is not finite"
        missing = self.weights.features - features.keys()
        if missing:
            return None, f"this answer has no {min(missing)}, which {self.title} was fitted with"
        return self.weights.logit(features), None


def require_enough(wrong: _Flags, title: str) -> None:
    """Raise `FitError` unless there are enough graded answers of both kinds."""
    n, n_wrong = len(wrong), int(wrong.sum())
    if n < MIN_ANSWERS or min(n_wrong, n - n_wrong) < MIN_EACH:
        raise FitError(
            f"{title} takes at least {MIN_ANSWERS} graded answers with scores, {MIN_EACH} of them right and "
            f"{MIN_EACH} wrong, to be fitted on; there are {n}, {n - n_wrong} right and {n_wrong} wrong. "
            "Grade more answers, or use MaxProbability, which needs none."
        )


def fit_weights(records: Sequence[Features], wrong: _Flags) -> FusedWeights:
    """Ridge-penalised logistic regression on the standardised columns of the features that all records have.

    Raises:
        FitError: no feature varies.
    """
    shared = [name for name in records[0] if all(name in record for record in records)]
    plain = [name for name in shared if not name.startswith(STATE)]
    states = [name for name in shared if name.startswith(STATE)]
    names = (*(LOG + name for name in plain), *(name for name in plain if name in _AS_IS), *states)
    columns = [column for column in (_column(name, records) for name in names) if column is not None]
    if not columns:
        raise FitError("No feature differs between the answers: there is nothing to learn. Use MaxProbability.")
    width = max(1, len(states))
    worth = np.array([1 / math.sqrt(width) if c.name.startswith(STATE) else _PLAIN for c in columns])
    x = np.stack([(column.values - column.centre) / column.scale for column in columns], axis=1)
    leaning = np.array([column.name.startswith(LOG) and column.name.removeprefix(LOG) in ANCHOR for column in columns])
    learned, intercept = _regression(x, wrong, worth)
    share = _share(x, wrong, worth, leaning)
    weights: list[float] = _leant(learned, leaning, x, share).tolist()
    return FusedWeights(
        columns=tuple(column.name for column in columns),
        lows=tuple(column.low for column in columns),
        highs=tuple(column.high for column in columns),
        centres=tuple(column.centre for column in columns),
        scales=tuple(column.scale for column in columns),
        weights=tuple(
            _short(w) if column.name.startswith(STATE) else w for w, column in zip(weights, columns, strict=True)
        ),
        intercept=intercept,
        n=len(wrong),
        n_wrong=int(wrong.sum()),
    )


def _sklearn(module: str) -> Any:
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise MissingExtraError("scikit-learn", extra="eval") from None


def _regression(x: _Matrix, wrong: _Flags, worth: _Vector) -> tuple[_Vector, float]:
    """Weights and intercept of a ridge-penalised logistic regression on standardised columns of this worth."""
    fitted = _sklearn("linear_model").LogisticRegression(C=_C, max_iter=1000).fit(x * worth, wrong)
    return fitted.coef_[0] * worth, float(fitted.intercept_[0])


def _leant(learned: _Vector, leaning: _Flags, x: _Matrix, share: float) -> _Vector:
    """Weights of (s + share a) / (1 + share): s by the `learned` ones, a the sum of the `leaning` columns, as wide."""
    if not share:
        return learned
    width = float((x @ learned).std() / (x @ leaning.astype(np.float64)).std())
    return (learned + share * width * leaning) / (1 + share)


def _share(x: _Matrix, wrong: _Flags, worth: _Vector, leaning: _Flags) -> float:
    """How much to lean on the label-free score: nothing where it does not rise with wrong answers."""
    sums = x @ leaning.astype(np.float64)
    if not leaning.any() or not wrong.any() or wrong.all() or sums[wrong].mean() <= sums[~wrong].mean():
        return 0.0
    if min(wrong.sum(), (~wrong).sum()) < _FOLDS:
        return SHARES[0]
    kinds = {"n_splits": _FOLDS, "n_repeats": _REPEATS, "random_state": len(wrong)}
    found = np.zeros(len(SHARES))
    for inside, out in _sklearn("model_selection").RepeatedStratifiedKFold(**kinds).split(x, wrong):
        learned, _ = _regression(x[inside], wrong[inside], worth)
        weights = np.stack([_leant(learned, leaning, x[inside], share) for share in SHARES], axis=1)
        scores = x[out] @ weights
        found += [_sklearn("metrics").roc_auc_score(wrong[out], column) for column in scores.T]
    enough = found.max() - _YIELDS * _FOLDS * _REPEATS
    return next(share for share, value in zip(SHARES, found, strict=True) if value >= enough)


class _Column(NamedTuple):
    """A feature, or its logarithm, over all records: its entries in `FusedWeights`, and the values."""

    name: str
    low: float
    high: float
    centre: float
    scale: float
    values: NDArray[np.float64]


def _column(name: str, records: Sequence[Features]) -> _Column | None:
    """The column of that name; None where it does not vary."""
    feature = name.removeprefix(LOG)
    raw = np.array([record[feature] for record in records], dtype=np.float64)
    usable = raw[raw > 0] if name != feature else raw
    if not len(usable):
        return None
    low, high = float(usable.min()), float(usable.max())
    values = np.log(np.maximum(raw, low)) if name != feature else raw
    centre, spread = float(values.mean()), float(values.std())
    if spread <= 1e-9 * (1 + abs(centre)):
        return None
    if name.startswith(STATE):
        centre, spread = _short(centre), _short(spread)
        low, high = _short(centre - _STATE_RANGE * spread), _short(centre + _STATE_RANGE * spread)
        values = raw.clip(low, high)
    return _Column(name, low, high, centre, spread, values)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def observed_features(seen: Observation) -> Features | None:
    """The features of an answer that was observed; None where there is nothing finite.

    `mean_entropy`, `gnll` and `mean_nll` (nats) describe the answer, `length` its tokens, `first_nll` and
    `first_entropy` its first token, `greatest_entropy` and `greatest_nll` the most doubtful one. The names of the mean
    hidden state's numbers, to five digits, begin with `STATE`.
    """
    if seen.greedy_nll is None or seen.mean_entropy is None or not seen.state:
        return None
    count = len(seen.log_probs)
    likelihoods = {
        "mean_entropy": seen.mean_entropy,
        "gnll": seen.greedy_nll,
        "mean_nll": seen.greedy_nll / count,
        "length": float(count),
        "first_nll": -seen.log_probs[0],
        "first_entropy": seen.entropies[0],
        "greatest_entropy": max(seen.entropies),
        "greatest_nll": -min(seen.log_probs),
    }
    states = {f"{STATE}{number}": float(f"{value:.5g}") for number, value in enumerate(seen.state)}
    # Rounding leaves some of these a hair below zero (-0.0, or an entropy of -1e-17).
    return {name: max(0.0, value) for name, value in likelihoods.items()} | states
