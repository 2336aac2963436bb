"""The estimators of guards: that of a calibration, to which its threshold belongs, and those that score sentences."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from semgrad_guard.calibration import Calibration
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import KIND_OF, Estimator, HybridGrad
from semgrad_guard.estimators.learned import FusedStates
from semgrad_guard.estimators.own_tokens import ReplayEstimator
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.named import did_you_mean


def estimator_of(calibration: Calibration | None) -> Estimator:
    """The estimator that a calibration was made for, fitted weights and settings included; HybridGrad without one.

    Raises:
        CalibrationError: the calibration names an estimator that is not known here, or one whose settings (a model of
            its own, say) cannot be read back from the file.
    """
    if calibration is None or calibration.binding is None:
        return HybridGrad()
    name, settings = calibration.binding.estimator, calibration.binding.settings or {}
    if name not in KIND_OF:
        raise CalibrationError(
            f"The calibration was made for the estimator {name!r}, which is not known here. Known are "
            f"{', '.join(KIND_OF)}. Pass the estimator itself, or calibrate again."
        )
    kind: Any = KIND_OF[name]
    given: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value := settings[field.name], list) else value
        for field in fields(kind)
        if field.name in settings
    }
    if issubclass(kind, FusedStates):
        if calibration.choice is None or calibration.choice.weights is None:
            raise CalibrationError(f"The calibration was made for {kind.title} and holds no weights. Calibrate again.")
        given["weights"] = calibration.choice.weights
    found: Estimator = kind(**given) if issubclass(kind, ReplayEstimator | FusedStates) else kind()
    own = found.settings()
    if own != {key: settings.get(key, value) for key, value in own.items()}:
        raise CalibrationError(
            f"The calibration was made for {name} with settings that cannot be made again from the file alone. "
            "Pass the estimator itself."
        )
    return found


def as_estimator(given: Estimator | str) -> Estimator:
    """An estimator as it is, or by its name.

    Raises:
        InputError: there is none of that name, it is none, it is a class, or it needs to be fitted first.
    """
    if isinstance(given, type):
        raise InputError(f"{given.__name__} is a class: pass an object, {given.__name__}(), or its name")
    if isinstance(given, str):
        given = named_estimator(given)
    if not callable(given) or not hasattr(given, "objective"):
        raise InputError(f"{given!r:.60} is no estimator; give one's name, or an object such as HybridGrad()")
    if isinstance(given, FusedStates) and given.weights is None:
        raise InputError(
            f"{given.title} learns from graded answers first: calibrate with estimator={given.name!r}, and give a "
            "policy with that calibration"
        )
    return given


def named_estimator(name: str) -> Estimator:
    """The estimator of that name, with its default settings.

    Raises:
        InputError: there is none.
    """
    if name not in KIND_OF:
        raise InputError(
            f"{name!r} is no estimator; there are {', '.join(KIND_OF)}.{did_you_mean(name, tuple(KIND_OF))}"
        ).about("estimator")
    return KIND_OF[name]()


def require_by_sentence(estimator: Estimator) -> None:
    """Refuse an estimator that compares whole answers.

    Raises:
        InputError: it draws further answers, or asks the model about this one.
    """
    if isinstance(estimator, AskingEstimator):
        raise InputError(
            f'{estimator.name} compares whole answers; by="sentence" needs an estimator of one replay, or of the '
            "likelihoods, e.g. HybridGrad()"
        )
