"""From a calibration back to the estimator that its threshold belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from semgrad_guard.decision import Calibration
from semgrad_guard.errors import CalibrationError
from semgrad_guard.estimators import ESTIMATORS, Estimator, FusedGrad, HybridGrad


def estimator_of(calibration: Calibration | None) -> Estimator:
    """The estimator that a calibration was made for, fitted weights and settings included; HybridGrad without one.

    Raises:
        CalibrationError: the calibration names an estimator that is not known here, or settings that it does not have.
    """
    if calibration is None or calibration.binding is None:
        return HybridGrad()
    bound = calibration.binding
    known = {estimator.name: estimator for estimator in (*ESTIMATORS, FusedGrad)}
    if bound.estimator not in known:
        raise CalibrationError(
            f"The calibration was made for the estimator {bound.estimator!r}, which is not known here (known: "
            f"{', '.join(known)}). Pass the estimator itself, or calibrate again."
        )
    kind: Any = known[bound.estimator]
    settings = _fields(kind, bound.settings or {})
    if kind is FusedGrad:
        if calibration.choice is None or calibration.choice.weights is None:
            raise CalibrationError("The calibration was made for FusedGrad and holds no weights. Calibrate again.")
        settings["weights"] = calibration.choice.weights
    return cast(Estimator, kind(**settings))


def _fields(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's own of the settings that a calibration is bound to, lists as the tuples that they were."""
    names = {field.name for field in fields(kind)}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items() if key in names}
