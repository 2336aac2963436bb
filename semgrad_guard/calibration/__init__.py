"""Calibrating: thresholds that keep a promise, P(correct) and drift. Imports neither torch nor transformers."""

from __future__ import annotations

from semgrad_guard.calibration.binding import Binding, EngineIdentity
from semgrad_guard.calibration.calibrating import EngineAnswers, calibrate
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.choice import EstimatorChoice
from semgrad_guard.calibration.drift import Drift, DriftMonitor, drift

__all__ = [
    "Binding",
    "Calibration",
    "Drift",
    "DriftMonitor",
    "EngineAnswers",
    "EngineIdentity",
    "EstimatorChoice",
    "calibrate",
    "drift",
]
