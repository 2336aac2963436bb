"""How good uncertainties are: ranking (here), intervals, the honesty of P(correct), and coverage under a promise."""

from semgrad_guard.evaluation.metrics.ranking import RiskCoverage as RiskCoverage
from semgrad_guard.evaluation.metrics.ranking import aurc as aurc
from semgrad_guard.evaluation.metrics.ranking import auroc as auroc
from semgrad_guard.evaluation.metrics.ranking import risk_coverage as risk_coverage
