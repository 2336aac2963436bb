"""ExGrad (Igoe et al., 2022), extended to free-form answers as in the paper's appendix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.engine.scoring.scores import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator


@dataclass(frozen=True)
class ExGrad(ReplayEstimator):
    """Mean absolute gradient of the answer's log-likelihood by the output head's weights, >= 0: ParaGrad without w_t.

        S = 1 / (V d) || d sum_t log p(y_t) / d W_head ||_1

    For classifiers ExGrad is the expectation of the gradient's norm over the labels. Over all answers that is out of
    reach; like the paper, this takes the generated answer alone. `variant="official"` averages over its tokens.
    """

    variant: Variant = "paper"
    name: ClassVar[str] = "exgrad"
    title: ClassVar[str] = "ExGrad"

    @property
    def objective(self) -> Objective:
        """The likelihood without entropy weights."""
        return Objective(self.variant, weighted=False)

    def value(self, scores: GradientScores) -> float | None:
        """The head's gradient."""
        return scores.paragrad
