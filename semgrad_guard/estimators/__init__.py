"""One method, one small file. `ESTIMATORS` lists those that need no labels; `FusedGrad` is fitted first."""

from semgrad_guard.estimators.base import Estimator
from semgrad_guard.estimators.fusedgrad import FusedGrad
from semgrad_guard.estimators.hybridgrad import HybridGrad
from semgrad_guard.estimators.likelihood import GreedyNLL, MeanEntropy
from semgrad_guard.estimators.paragrad import ParaGrad
from semgrad_guard.estimators.semgrad import SemGrad

ESTIMATORS = (HybridGrad, SemGrad, ParaGrad, GreedyNLL, MeanEntropy)

__all__ = ["ESTIMATORS", "Estimator", "FusedGrad", "GreedyNLL", "HybridGrad", "MeanEntropy", "ParaGrad", "SemGrad"]
