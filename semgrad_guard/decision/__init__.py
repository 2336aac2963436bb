"""Deciding: thresholds that keep a promise, P(correct), actions and drift. Imports neither torch nor transformers."""

from __future__ import annotations

from semgrad_guard.decision.binding import Binding
from semgrad_guard.decision.calibration import calibrate
from semgrad_guard.decision.calibration_record import Calibration
from semgrad_guard.decision.choice import EstimatorChoice
from semgrad_guard.decision.drift import Drift, DriftMonitor, drift
from semgrad_guard.decision.policy import Policy
from semgrad_guard.decision.promise import Promise, combined_promise, split_delta

__all__ = [
    "Binding",
    "Calibration",
    "Drift",
    "DriftMonitor",
    "EstimatorChoice",
    "Policy",
    "Promise",
    "calibrate",
    "combined_promise",
    "drift",
    "split_delta",
]
