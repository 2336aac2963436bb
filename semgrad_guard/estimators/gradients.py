"""Gradients of one replay (paper, section 3.3): SemGrad, ParaGrad and their mixture, the default; ExGrad."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, cast

from semgrad_guard.declared import declared_options, require_valid
from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Norm, Objective, Variant
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.estimators.base import Likelihoods
from semgrad_guard.records import Score
from semgrad_guard.settings import ScoringOptions

_LATER_SETTINGS: dict[str, Any] = {
    "norm": "l1",
    "weighted": True,
    "token": None,
}
"""Settings of existing estimators that came later, and their defaults: absent then, as in calibrations made before."""


_objective = lru_cache(maxsize=64)(Objective)
"""One object for equal settings, which are checked once and not for every answer."""


class ReplayEstimator:
    """An estimator that reads its number off one replay. Subclasses define it in `value`."""

    name: ClassVar[str]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        require_valid(self)
        _ = self.objective  # refuses its settings

    @property
    def objective(self) -> Objective:
        """The paper's, but for the settings that a subclass shares with it."""
        own: dict[str, Any] = {
            one.name: getattr(self, one.name) for one in fields(Objective) if hasattr(self, one.name)
        }
        return _objective(**own)

    def settings(self) -> dict[str, Any]:
        """The dataclass fields, tuples as lists; those that came later only where they are not the default."""
        every: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # every estimator is a dataclass
        stated = {key: v for key, v in every.items() if key not in _LATER_SETTINGS or v != _LATER_SETTINGS[key]}
        return {key: list(cast("tuple[Any, ...]", v)) if isinstance(v, tuple) else v for key, v in stated.items()}

    def value(self, scores: Any) -> float | None:
        """The estimator's number for finite scores: a replay's (`GradientScores`), or the part that it needs."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        return read_off(evidence, self.objective, self.value)


def read_off(evidence: Evidence, objective: Objective, value: Callable[[GradientScores], float | None]) -> Score:
    """Score an answer by one number of its replay, with the parts as details."""
    timed = evidence.gradients(objective)
    if timed is None:
        return Score(None, evidence.why_empty)
    scores = timed.scores
    details = {
        "hybridgrad": scores.hybridgrad,
        "semgrad": scores.semgrad,
        "paragrad": scores.paragrad,
        **likelihoods(scores),
        "scored_tokens": len(evidence.response_ids),
        "scoring_ms": round(timed.milliseconds, 3),
        "tier": scores.tier,
    }
    if scores.deviation is not None:
        details["deviation"] = scores.deviation
    return Score.finite(value(scores), scores.reason, details)


def likelihoods(scores: Likelihoods) -> dict[str, float | None]:
    """The label-free scores that cost nothing: details of every other score."""
    nll, count = scores.greedy_nll, len(scores.log_probs)
    probability = None if nll is None or not count else -math.expm1(-nll / count)
    return {"mean_entropy": scores.mean_entropy, "gnll": nll, "max_probability": probability}


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
    `norm` is that of `Objective`. Without its weights this is ExGrad.
    """

    variant: Variant = "paper"
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    name: ClassVar[str] = "paragrad"
    title: ClassVar[str] = "ParaGrad"

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
    name: ClassVar[str] = "hybridgrad"
    title: ClassVar[str] = "HybridGrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "beta"):
            declared_options(ScoringOptions)[name].require(getattr(self, name))

    def value(self, scores: GradientScores) -> float | None:
        """The mixture."""
        return scores.hybrid(tau=self.tau, beta=self.beta)
