"""Gradients of one replay (paper, section 3.3): SemGrad, ParaGrad and their mixture, the default; ExGrad."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from semgrad_guard.declared import declared_options
from semgrad_guard.engine.objective import Norm, Objective, Variant
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.settings import Earlier, ScoringOptions


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

    For classifiers ExGrad (Igoe et al., 2022) is the expectation of the gradient's norm over the labels. Over all
    answers that is out of reach; like the paper, this takes the generated answer alone. `variant="official"` averages
    over its tokens.
    """

    variant: Variant = "paper"
    weighted: ClassVar[bool] = False
    name: ClassVar[str] = "exgrad"
    title: ClassVar[str] = "ExGrad"

    def value(self, scores: GradientScores) -> float | None:
        """The head's gradient."""
        return scores.paragrad


@dataclass(frozen=True)
class HybridGrad(ReplayEstimator):
    """SemGrad and ParaGrad, balanced by how sharp the model's distribution is, >= 0.

        S = (1 - a) SemGrad + beta a ParaGrad,    a = exp(-mean_t w_t / tau)

    Sharp answers (low entropy) lean on ParaGrad, open questions on SemGrad. `tau` > 0 and `beta` >= 0 are 1 in the
    paper's method; small `tau` leans to SemGrad, large `tau` and `beta` to ParaGrad. The other settings are those of
    `Objective`.

    No label-free mixture with likelihoods is offered: of all sums of up to four scores on SmolLM2, none chosen on two
    kinds of questions was ahead of maximum probability on two others by more than 0.001 of AUROC.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    tau: float = 1.0
    beta: float = 1.0
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    token: int | None = None
    sampled_rows: int | None = None
    earlier: Earlier = "context"
    name: ClassVar[str] = "hybridgrad"
    title: ClassVar[str] = "HybridGrad"

    def __post_init__(self) -> None:
        for name in ("tau", "beta"):
            declared_options(ScoringOptions)[name].require(getattr(self, name))
        Objective(norm=self.norm, sampled_rows=self.sampled_rows)  # refuses settings that cannot be sampled

    def value(self, scores: GradientScores) -> float | None:
        """The mixture."""
        return scores.hybrid(tau=self.tau, beta=self.beta)
