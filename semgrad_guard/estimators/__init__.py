"""One method, one class, in the file of its kind; `KINDS` is the table of all, by the names of commands and files.

Names load at their first use: the table alone needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semgrad_guard.lazy import lazy_names

KINDS = {
    "hybridgrad": "HybridGrad",
    "semgrad": "SemGrad",
    "paragrad": "ParaGrad",
    "exgrad": "ExGrad",
    "gnll": "GreedyNLL",
    "root_nll": "RootNLL",
    "max_probability": "MaxProbability",
    "mean_entropy": "MeanEntropy",
    "greatest_entropy": "GreatestEntropy",
    "ln_pe": "LengthNormalisedEntropy",
    "p_true": "PTrue",
    "self_consistency": "SelfConsistency",
    "deg": "Degree",
    "inside": "Inside",
    "semantic_entropy": "SemanticEntropy",
    "semantic_density": "SemanticDensity",
    "mutual_information": "MutualInformation",
    "sar": "SAR",
    "states": "FusedStates",
}
"""Name -> class, in the order of tables and help texts."""

NEEDS_LABELS = frozenset({"states"})
"""Those that are fitted on graded answers first."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from semgrad_guard.engine.answers.options import DiverseBeams as DiverseBeams
    from semgrad_guard.engine.answers.options import Sampling as Sampling
    from semgrad_guard.estimators.base import Estimator as Estimator
    from semgrad_guard.estimators.learned import FusedStates as FusedStates
    from semgrad_guard.estimators.own_tokens import ExGrad as ExGrad
    from semgrad_guard.estimators.own_tokens import GreatestEntropy as GreatestEntropy
    from semgrad_guard.estimators.own_tokens import GreedyNLL as GreedyNLL
    from semgrad_guard.estimators.own_tokens import HybridGrad as HybridGrad
    from semgrad_guard.estimators.own_tokens import MaxProbability as MaxProbability
    from semgrad_guard.estimators.own_tokens import MeanEntropy as MeanEntropy
    from semgrad_guard.estimators.own_tokens import ParaGrad as ParaGrad
    from semgrad_guard.estimators.own_tokens import RootNLL as RootNLL
    from semgrad_guard.estimators.own_tokens import SemGrad as SemGrad
    from semgrad_guard.estimators.reading import SAR as SAR
    from semgrad_guard.estimators.reading import MutualInformation as MutualInformation
    from semgrad_guard.estimators.reading import PTrue as PTrue
    from semgrad_guard.estimators.samples import Degree as Degree
    from semgrad_guard.estimators.samples import Inside as Inside
    from semgrad_guard.estimators.samples import LengthNormalisedEntropy as LengthNormalisedEntropy
    from semgrad_guard.estimators.samples import SelfConsistency as SelfConsistency
    from semgrad_guard.estimators.samples import SemanticDensity as SemanticDensity
    from semgrad_guard.estimators.samples import SemanticEntropy as SemanticEntropy
    from semgrad_guard.estimators.text_pairs import F1Equivalence as F1Equivalence
    from semgrad_guard.estimators.text_pairs import NLIEquivalence as NLIEquivalence

    ESTIMATORS: tuple[type[Any], ...]
    KIND_OF: Mapping[str, Any]
else:
    _load, _, __all__ = lazy_names(__name__)
    __all__ += ["ESTIMATORS", "KIND_OF"]

    def __getattr__(name: str) -> Any:
        if name == "KIND_OF":
            return {known: _load(kind) for known, kind in KINDS.items()}
        if name == "ESTIMATORS":
            return tuple(_load(kind) for known, kind in KINDS.items() if known not in NEEDS_LABELS)
        return _load(name)

    def __dir__() -> list[str]:
        return __all__
