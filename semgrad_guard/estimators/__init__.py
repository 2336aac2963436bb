"""One method, one small file; `KINDS` is the table of all of them, by the names that commands and files use.

Names load lazily: the table alone needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from semgrad_guard.engine.generation.sampling_plans import DiverseBeams, Sampling
    from semgrad_guard.estimators.base import Estimator
    from semgrad_guard.estimators.cascade import Cascade
    from semgrad_guard.estimators.degree import Degree
    from semgrad_guard.estimators.equivalence import ExactMatchEquivalence, F1Equivalence, NLIEquivalence
    from semgrad_guard.estimators.exgrad import ExGrad
    from semgrad_guard.estimators.fusedgrad import FusedGrad
    from semgrad_guard.estimators.fusedstates import FusedStates
    from semgrad_guard.estimators.hybridgrad import HybridGrad
    from semgrad_guard.estimators.inside import Inside
    from semgrad_guard.estimators.likelihood import GreatestEntropy, GreedyNLL, MaxProbability, MeanEntropy
    from semgrad_guard.estimators.llm_check import AttentionScore, HiddenScore
    from semgrad_guard.estimators.ln_pe import LengthNormalisedEntropy
    from semgrad_guard.estimators.mutual_information import MutualInformation
    from semgrad_guard.estimators.p_true import PTrue
    from semgrad_guard.estimators.paragrad import ParaGrad
    from semgrad_guard.estimators.rauq import RAUQ
    from semgrad_guard.estimators.sar import SAR
    from semgrad_guard.estimators.self_consistency import SelfConsistency
    from semgrad_guard.estimators.semantic_density import SemanticDensity
    from semgrad_guard.estimators.semantic_entropy import SemanticEntropy
    from semgrad_guard.estimators.semgrad import SemGrad

    ESTIMATORS: tuple[type[Any], ...]
    KIND_OF: Mapping[str, Any]

KINDS = {
    "hybridgrad": "hybridgrad.HybridGrad",
    "semgrad": "semgrad.SemGrad",
    "paragrad": "paragrad.ParaGrad",
    "exgrad": "exgrad.ExGrad",
    "gnll": "likelihood.GreedyNLL",
    "max_probability": "likelihood.MaxProbability",
    "mean_entropy": "likelihood.MeanEntropy",
    "greatest_entropy": "likelihood.GreatestEntropy",
    "hidden_score": "llm_check.HiddenScore",
    "attention_score": "llm_check.AttentionScore",
    "rauq": "rauq.RAUQ",
    "cascade": "cascade.Cascade",
    "ln_pe": "ln_pe.LengthNormalisedEntropy",
    "p_true": "p_true.PTrue",
    "self_consistency": "self_consistency.SelfConsistency",
    "deg": "degree.Degree",
    "inside": "inside.Inside",
    "semantic_entropy": "semantic_entropy.SemanticEntropy",
    "semantic_density": "semantic_density.SemanticDensity",
    "mutual_information": "mutual_information.MutualInformation",
    "sar": "sar.SAR",
    "fused": "fusedgrad.FusedGrad",
    "states": "fusedstates.FusedStates",
}
"""Name -> module and class below this folder, in the order of tables and help texts."""

NEEDS_LABELS = frozenset({"fused", "states"})
"""Those that are fitted on graded answers first."""

_OTHERS = {
    "DiverseBeams": "semgrad_guard.engine.generation.sampling_plans",
    "Sampling": "semgrad_guard.engine.generation.sampling_plans",
    "Estimator": "semgrad_guard.estimators.base",
    "ExactMatchEquivalence": "semgrad_guard.estimators.equivalence",
    "F1Equivalence": "semgrad_guard.estimators.equivalence",
    "NLIEquivalence": "semgrad_guard.estimators.equivalence",
}
_HOME_OF = {
    **_OTHERS,
    **{kind.split(".")[1]: f"{__name__}.{kind.split('.')[0]}" for kind in KINDS.values()},
}

__all__ = [
    "ESTIMATORS",
    "KINDS",
    "KIND_OF",
    "NEEDS_LABELS",
    "RAUQ",
    "SAR",
    "AttentionScore",
    "Cascade",
    "Degree",
    "DiverseBeams",
    "Estimator",
    "ExGrad",
    "ExactMatchEquivalence",
    "F1Equivalence",
    "FusedGrad",
    "FusedStates",
    "GreatestEntropy",
    "GreedyNLL",
    "HiddenScore",
    "HybridGrad",
    "Inside",
    "LengthNormalisedEntropy",
    "MaxProbability",
    "MeanEntropy",
    "MutualInformation",
    "NLIEquivalence",
    "PTrue",
    "ParaGrad",
    "Sampling",
    "SelfConsistency",
    "SemGrad",
    "SemanticDensity",
    "SemanticEntropy",
]


def __getattr__(name: str) -> Any:
    if name == "KIND_OF":
        value: Any = {known: __getattr__(kind.split(".")[1]) for known, kind in KINDS.items()}
    elif name == "ESTIMATORS":
        value = tuple(kind for known, kind in __getattr__("KIND_OF").items() if known not in NEEDS_LABELS)
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
