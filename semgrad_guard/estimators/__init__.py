"""One method, one small file. `ESTIMATORS` lists those that need no labels; `FusedGrad` is fitted first."""

from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.exgrad import ExGrad
from semgrad_guard.estimators.fusedgrad import FusedGrad
from semgrad_guard.estimators.hybridgrad import HybridGrad
from semgrad_guard.estimators.likelihood import GreedyNLL, MaxProbability, MeanEntropy
from semgrad_guard.estimators.paragrad import ParaGrad
from semgrad_guard.estimators.semgrad import SemGrad

ESTIMATORS = (HybridGrad, SemGrad, ParaGrad, ExGrad, GreedyNLL, MaxProbability, MeanEntropy)

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "ExGrad",
    "FusedGrad",
    "GreedyNLL",
    "HybridGrad",
    "MaxProbability",
    "MeanEntropy",
    "ParaGrad",
    "SemGrad",
]
