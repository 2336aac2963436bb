"""Learned estimators among the other methods: every answer scored by weights that were fitted without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators.fusedgrad import FusedGrad
from semgrad_guard.estimators.fusedstates import FusedStates
from semgrad_guard.estimators.learned import LearnedEstimator
from semgrad_guard.evaluation.calibrating.learning import LearningSet, out_of_fold
from semgrad_guard.evaluation.runs.answers import Answer

LEARNED: Mapping[str, LearnedEstimator] = {FusedGrad.name: FusedGrad(), FusedStates.name: FusedStates()}
"""Those that a run keeps features of, by name."""


def cross_fitted(
    name: str, answers: Sequence[Answer], correct: Sequence[bool]
) -> tuple[list[float | None], str | None]:
    """Scores from the features that a run kept, by five-fold cross-validation; none, and the reason, where that fails.

    Each fold has weights of its own, so its scores are on a scale of their own, too: close, not equal.
    """
    features = {name: [answer.scores[name].features for answer in answers]}
    part = LearningSet([answer.key for answer in answers], list(correct), features, {})
    try:
        return out_of_fold(part, LEARNED[name], seed=0), None
    except (FitError, MissingExtraError) as error:
        return [None] * len(answers), str(error)
