"""How well uncertainties do: ranking (here), its intervals, the honesty of P(correct), and what a promise leaves."""

from __future__ import annotations

from semgrad_guard.evaluation.metrics.ranking import RiskCoverage, accuracy_at, aurc, auroc, prr, risk_coverage

__all__ = ["RiskCoverage", "accuracy_at", "aurc", "auroc", "prr", "risk_coverage"]
