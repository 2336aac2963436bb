"""SemGrad (paper, Eq. 4)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from semgrad_guard.engine.objective import Norm, Variant
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.settings import Earlier


@dataclass(frozen=True)
class SemGrad(ReplayEstimator):
    """Mean absolute gradient of the entropy-weighted log-likelihood by the hidden states at t*, >= 0.

        S = 1 / |h| || d sum_t w_t log p(y_t) / d h ||_1,    h = h^(floor(L/2)+1 .. L-1) at t*

    A model that is sure keeps its answer when the meaning of the prompt moves a little: the gradient is small.
    The settings are those of `Objective`. The paper's ablation (Table 2) varies each: `norm="l2"`, `weighted=False`,
    other `layers`, and `token=-1`, the prompt's last token in place of t*.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    token: int | None = None
    earlier: Earlier = "context"
    name: ClassVar[str] = "semgrad"
    title: ClassVar[str] = "SemGrad"

    def value(self, scores: GradientScores) -> float | None:
        """SemGrad itself."""
        return scores.semgrad
