"""ParaGrad (paper, section 3.3), and without its weights ExGrad (Igoe et al., 2022), as in the paper's appendix."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from semgrad_guard.engine.objective import Norm, Objective, Variant
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator


@dataclass(frozen=True)
class ParaGrad(ReplayEstimator):
    """Mean absolute gradient of the entropy-weighted log-likelihood by the output head's weights, >= 0.

        S = 1 / (V d) || d sum_t w_t log p(y_t) / d W_head ||_1

    Of a tied head only the head's part counts. `variant="official"` averages over the tokens instead of summing;
    `norm` and `sampled_rows` (an estimate with a standard error, for less time) are those of `Objective`. Without its
    weights this is ExGrad.
    """

    variant: Variant = "paper"
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    sampled_rows: int | None = None
    name: ClassVar[str] = "paragrad"
    title: ClassVar[str] = "ParaGrad"

    def __post_init__(self) -> None:
        Objective(norm=self.norm, sampled_rows=self.sampled_rows)  # refuses settings that cannot be sampled

    def value(self, scores: GradientScores) -> float | None:
        """ParaGrad itself."""
        return scores.paragrad


@dataclass(frozen=True)
class ExGrad(ReplayEstimator):
    """Mean absolute gradient of the answer's log-likelihood by the output head's weights, >= 0: ParaGrad without w_t.

        S = 1 / (V d) || d sum_t log p(y_t) / d W_head ||_1

    For classifiers ExGrad is the expectation of the gradient's norm over the labels. Over all answers that is out of
    reach; like the paper, this takes the generated answer alone. `variant="official"` averages over its tokens.
    """

    variant: Variant = "paper"
    weighted: ClassVar[bool] = False
    name: ClassVar[str] = "exgrad"
    title: ClassVar[str] = "ExGrad"

    def value(self, scores: GradientScores) -> float | None:
        """The head's gradient."""
        return scores.paragrad
