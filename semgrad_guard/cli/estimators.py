"""`--estimator` and its settings, and the estimators that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from semgrad_guard.cli.options import METHOD_NAMES
from semgrad_guard.declared import Option
from semgrad_guard.loading import ESTIMATOR_NAMES, EstimatorChoice, load_estimator
from semgrad_guard.settings import REPORTED, UNCERTAINTY, ScoringOptions

if TYPE_CHECKING:
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.guard import Policy

E = TypeVar("E", bound="Estimator")


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec(EstimatorChoice, ScoringOptions):
    """The options; None leaves a setting to the calibration, or to the estimator's own default."""

    def make(self, policy: Policy | None = None) -> Estimator:
        """The estimator of that name, or the policy's own without one, with the settings that were given.

        Raises:
            BadParameter: it takes no such setting.
            InputError: a setting is out of its range.
            CalibrationError: the policy's own estimator cannot be made again from its calibration.
        """
        return self.set_on(load_estimator(self.estimator, policy))

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
        return {name: value for name, value in asdict(self).items() if name != "estimator" and value is not None}


@dataclass(frozen=True, kw_only=True)
class LearnedEstimatorSpec(EstimatorSpec):
    """The same, with estimators that are fitted on a part of the answers."""

    estimator: Annotated[
        str,
        Option(
            f"How uncertainty is measured: {', '.join(ESTIMATOR_NAMES)}; states or fused, which are fitted on a part "
            "of the answers (states needs no gradients); or auto, the best of eight of these on that part.",
            UNCERTAINTY,
            names=tuple(dict.fromkeys((*METHOD_NAMES, "auto", *REPORTED))),
        ),
    ] = "hybridgrad"


def _settings_of(estimator: Any) -> set[str]:
    return {field.name for field in fields(estimator)}


def estimators_for(spec: EstimatorSpec) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`: with it the scores that generating computes anyway, one of which takes
    the place of a learned one where there are too few labels. They share one replay unless a setting that only some of
    them take tells them apart."""
    from semgrad_guard.evaluation.calibrating import FREE, LEARNED

    own: list[Estimator] = candidates_for(spec) if spec.estimator == "auto" else []
    if not own:
        own = [spec.set_on(LEARNED[str(spec.estimator)]) if spec.estimator in LEARNED else spec.make()]
    return [*own, *(free for free in FREE if free.name not in [one.name for one in own])]


def candidates_for(spec: EstimatorSpec) -> list[Estimator]:
    """The estimators that `auto` compares."""
    from semgrad_guard.evaluation.calibrating import CANDIDATES

    return [spec.set_where_taken(candidate) for candidate in CANDIDATES]


def learns(spec: EstimatorSpec) -> bool:
    """Whether the estimator is fitted, or chosen, on labels."""
    from semgrad_guard.evaluation.calibrating import LEARNED

    return spec.estimator == "auto" or spec.estimator in LEARNED
