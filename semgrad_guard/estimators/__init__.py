"""One method, one small file. `ESTIMATORS` lists those that need no labels; `FusedGrad` is fitted first.

`KIND_OF` knows all of them, `FusedGrad` too, by the names that commands and files use.
"""

from collections.abc import Mapping
from typing import Any

from semgrad_guard.engine.generation.sampling_plans import DiverseBeams, Sampling
from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.degree import Degree
from semgrad_guard.estimators.equivalence import ExactMatchEquivalence, F1Equivalence, NLIEquivalence
from semgrad_guard.estimators.exgrad import ExGrad
from semgrad_guard.estimators.fusedgrad import FusedGrad
from semgrad_guard.estimators.hybridgrad import HybridGrad
from semgrad_guard.estimators.inside import Inside
from semgrad_guard.estimators.likelihood import GreedyNLL, MaxProbability, MeanEntropy
from semgrad_guard.estimators.ln_pe import LengthNormalisedEntropy
from semgrad_guard.estimators.mutual_information import MutualInformation
from semgrad_guard.estimators.p_true import PTrue
from semgrad_guard.estimators.paragrad import ParaGrad
from semgrad_guard.estimators.sar import SAR
from semgrad_guard.estimators.self_consistency import SelfConsistency
from semgrad_guard.estimators.semantic_density import SemanticDensity
from semgrad_guard.estimators.semantic_entropy import SemanticEntropy
from semgrad_guard.estimators.semgrad import SemGrad

ESTIMATORS = (
    HybridGrad,
    SemGrad,
    ParaGrad,
    ExGrad,
    GreedyNLL,
    MaxProbability,
    MeanEntropy,
    LengthNormalisedEntropy,
    PTrue,
    SelfConsistency,
    Degree,
    Inside,
    SemanticEntropy,
    SemanticDensity,
    MutualInformation,
    SAR,
)
KIND_OF: Mapping[str, Any] = {kind.name: kind for kind in (*ESTIMATORS, FusedGrad)}

__all__ = [
    "ESTIMATORS",
    "KIND_OF",
    "SAR",
    "Degree",
    "DiverseBeams",
    "Estimator",
    "ExGrad",
    "ExactMatchEquivalence",
    "F1Equivalence",
    "FusedGrad",
    "GreedyNLL",
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
