"""Numbers of an answer's own tokens: gradients of one replay (paper, section 3.3), and likelihoods, which are free."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, cast

from semgrad_guard.declared import declared_options, require_valid
from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.engine.scores.gradients import GradientScores, Observation
from semgrad_guard.estimators.base import timed
from semgrad_guard.records import Score
from semgrad_guard.settings import ScoringOptions

OBSERVING = Objective(gradients=False)
"""The objective of estimators that differentiate nothing."""

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
        return _objective(**{one.name: getattr(self, one.name) for one in fields(Objective) if hasattr(self, one.name)})

    def settings(self) -> dict[str, Any]:
        """The dataclass fields, tuples as lists."""
        every: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # every estimator is a dataclass
        return {key: list(cast("tuple[Any, ...]", v)) if isinstance(v, tuple) else v for key, v in every.items()}

    def value(self, scores: Any) -> float | None:
        """The estimator's number for finite scores: a replay's (`GradientScores`), or the part that it needs."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        timed = evidence.gradients(self.objective)
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
        return Score.finite(self.value(scores), scores.reason, details)


class ObservedEstimator(ReplayEstimator):
    """An estimator that reads its number off an answer's likelihoods, which generating has computed."""

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = timed(evidence.observed)
        if seen is None:
            return Score(None, evidence.why_empty)
        return Score.finite(self.value(seen), seen.reason, observed_details(seen, milliseconds))


def observed_details(seen: Observation, milliseconds: float) -> dict[str, Any]:
    """The details of the score of an observed answer."""
    return {**likelihoods(seen), "scored_tokens": len(seen.log_probs), "scoring_ms": round(milliseconds, 3)}


def likelihoods(scores: GradientScores | Observation) -> dict[str, float | None]:
    """The label-free scores that cost nothing: details of every other score."""
    nll, count = scores.greedy_nll, len(scores.log_probs)
    probability = None if nll is None or not count else -math.expm1(-nll / count)
    return {"mean_entropy": scores.mean_entropy, "gnll": nll, "max_probability": probability}


@dataclass(frozen=True)
class SemGrad(ReplayEstimator):
    """Mean absolute gradient of the entropy-weighted log-likelihood by the hidden states at t*, >= 0.

        S = 1 / |h| || d sum_t w_t log p(y_t) / d h ||_1,    h = h^(floor(L/2)+1 .. L-1) at t*

    A model that is sure keeps its answer when the meaning of the prompt moves a little: the gradient is small.
    The settings are those of `Objective`, by which the paper's ablation (Table 2) varies others as well.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    name: ClassVar[str] = "semgrad"
    title: ClassVar[str] = "SemGrad"

    def value(self, scores: GradientScores) -> float | None:
        """SemGrad itself."""
        return scores.semgrad


@dataclass(frozen=True)
class ParaGrad(ReplayEstimator):
    """Mean absolute gradient of the entropy-weighted log-likelihood by the output head's weights, >= 0.

        S = 1 / (V d) || d sum_t w_t log p(y_t) / d W_head ||_1

    Of a tied head only the head's part counts. `variant="official"` averages over the tokens instead of summing.
    Without its weights this is ExGrad.
    """

    variant: Variant = "paper"
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
    name: ClassVar[str] = "hybridgrad"
    title: ClassVar[str] = "HybridGrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "beta"):
            declared_options(ScoringOptions)[name].require(getattr(self, name))

    def value(self, scores: GradientScores) -> float | None:
        """The mixture."""
        return scores.hybrid(tau=self.tau, beta=self.beta)


@dataclass(frozen=True)
class GreedyNLL(ObservedEstimator):
    """G-NLL: the greedy answer's negative log-likelihood in nats, >= 0; the end token does not count.

    Source: Aichberger et al., "Rethinking uncertainty estimation in natural language generation", 2024.
    """

    name: ClassVar[str] = "gnll"
    title: ClassVar[str] = "G-NLL"

    def value(self, scores: GradientScores | Observation) -> float | None:
        """-log p(answer)."""
        return scores.greedy_nll


@dataclass(frozen=True)
class RootNLL(ObservedEstimator):
    """The answer's negative log-likelihood divided by the square root of its tokens, in nats, >= 0.

    Between G-NLL, which grows with every token, and the mean, in which one doubtful token of a long answer is lost: if
    tokens erred independently, the sum's noise would grow with that root. (AUROC on 599 answers of the embedded model:
    0.921, G-NLL 0.919, maximum probability 0.916; on SmolLM2's four sets it lies between the two, or above both.)
    """

    name: ClassVar[str] = "root_nll"
    title: ClassVar[str] = "NLL / root of T"

    def value(self, scores: GradientScores | Observation) -> float | None:
        """-log p(answer) / sqrt(T)."""
        return None if scores.greedy_nll is None else scores.greedy_nll / math.sqrt(len(scores.log_probs))


@dataclass(frozen=True)
class MaxProbability(ObservedEstimator):
    """1 - the geometric mean of the answer's token probabilities, in [0, 1].

    The maximum softmax probability of a classifier, carried over to a sequence: a greedy token's probability is the
    largest of its distribution. The mean makes long and short answers comparable; without it the ranks would be those
    of G-NLL. (It ranks like perplexity.)

    Source: Hendrycks & Gimpel, "A baseline for detecting misclassified and out-of-distribution examples", ICLR 2017.
    """

    name: ClassVar[str] = "max_probability"
    title: ClassVar[str] = "Max probability"

    def value(self, scores: GradientScores | Observation) -> float | None:
        """1 - exp(1/T sum_t log p(y_t)), near 0 to full precision."""
        return likelihoods(scores)["max_probability"]


@dataclass(frozen=True)
class MeanEntropy(ObservedEstimator):
    """The mean of the answer's token entropies in nats, >= 0."""

    name: ClassVar[str] = "mean_entropy"
    title: ClassVar[str] = "Mean entropy"

    def value(self, scores: GradientScores | Observation) -> float | None:
        """1/T sum_t H(p_t)."""
        return scores.mean_entropy


@dataclass(frozen=True)
class GreatestEntropy(ObservedEstimator):
    """The greatest of the answer's token entropies in nats, >= 0: one doubtful word is enough.

    Source: Manakul et al., "SelfCheckGPT: zero-resource black-box hallucination detection for generative large language
    models", EMNLP 2023 (its Max(H)).
    """

    name: ClassVar[str] = "greatest_entropy"
    title: ClassVar[str] = "Greatest entropy"

    def value(self, scores: GradientScores | Observation) -> float | None:
        """max_t H(p_t)."""
        return max(scores.entropies) if scores.entropies else None
