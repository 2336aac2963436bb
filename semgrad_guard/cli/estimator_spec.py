"""`--estimator` and its settings, and the estimator that they mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from semgrad_guard.loading import load_estimator

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import Policy

E = TypeVar("E", bound="Estimator")


@dataclass(frozen=True)
class EstimatorSpec:
    """The options; None leaves a setting to the calibration, or to the estimator's own default."""

    name: str | None = None
    variant: str | None = None
    tau: float | None = None
    beta: float | None = None
    sampled_rows: int | None = None

    def estimator(self, policy: Policy | None = None) -> Estimator:
        """The estimator of that name, or the policy's own without one, with the settings that were given.

        Raises:
            BadParameter: it takes no such setting.
            InputError: a setting is out of its range.
            CalibrationError: the policy's own estimator cannot be made again from its calibration.
        """
        return self.set_on(load_estimator(self.name, policy))

    def set_on(self, estimator: E) -> E:
        """The estimator with the settings that were given.

        Raises:
            BadParameter: it takes no such setting; the message names those that do.
        """
        for name in self._given:
            if name not in _settings_of(estimator):
                from semgrad_guard.estimators import KIND_OF

                takers = ", ".join(taker for taker, kind in KIND_OF.items() if name in _settings_of(kind))
                raise typer.BadParameter(f"{estimator.name} takes no --{name.replace('_', '-')}: it is for {takers}")
        return self.set_where_taken(estimator)

    def set_where_taken(self, estimator: E) -> E:
        """The estimator with those of the given settings that it takes: for many at once."""
        taken = {name: value for name, value in self._given.items() if name in _settings_of(estimator)}
        return cast("E", replace(cast(Any, estimator), **taken))

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "name" and value is not None}


def _settings_of(estimator: Any) -> set[str]:
    return {field.name for field in fields(estimator)}
