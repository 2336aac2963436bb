"""HybridGrad (paper, section 3.3, and the appendix for tau and beta): the default."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from semgrad_guard.declared import declared_options
from semgrad_guard.engine.objective import Norm, Objective, Variant
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.settings import Earlier, ScoringOptions


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
