"""The estimator of a calibration on examples: the model's own, another one, a learned one, or the best (`auto`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from semgrad_guard.adapters.calibrating import AnsweredExample
from semgrad_guard.adapters.code_identity import parts_within
from semgrad_guard.calibration import Binding
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import KIND_OF, NEEDS_LABELS, Estimator
from semgrad_guard.estimators.learned import LearnedEstimator
from semgrad_guard.evaluation.calibrating import (
    CANDIDATES,
    FREE,
    LABEL_FREE,
    LearningSet,
    Outcome,
    calibrate_best,
    calibrate_learned,
    calibrate_scored,
)
from semgrad_guard.guard import as_estimator
from semgrad_guard.guard.verdicts import RecordedScore


@dataclass(frozen=True)
class ChosenEstimator:
    """The request: None for the model's own, "auto" for the best, or an estimator; a learned one without weights is
    fitted on a part of the examples."""

    request: Any

    @classmethod
    def of(cls, request: Any) -> Self:
        """The request, checked: a name as on the command line, or an estimator.

        Raises:
            InputError: no such name, or not an estimator.
        """
        if request is None or request == "auto":
            return cls(request)
        if isinstance(request, str):
            if request not in KIND_OF:
                raise InputError(f"estimator is 'auto' or one of {', '.join(KIND_OF)}, not {request!r}")
            return cls(KIND_OF[request]())
        found: Any = as_estimator(request)
        if not callable(found) or not hasattr(found, "objective"):
            raise InputError(f"an estimator is one such as HybridGrad(), its name or 'auto', not {request!r}")
        return cls(found)

    @property
    def needed(self) -> tuple[Estimator, ...]:
        """The estimators whose scores of every example are needed, besides the model's own."""
        if self.request is None:
            return ()
        if self.request == "auto":
            return CANDIDATES
        return (self.request, LABEL_FREE) if _is_unfitted(self.request) else (self.request,)

    @property
    def recorded(self) -> tuple[Estimator, ...]:
        """Those whose scores the record keeps."""
        return tuple({estimator.name: estimator for estimator in (*FREE, *self.needed)}.values())

    def require_fitted(self, parts: Iterable[Any], *, models: tuple[type, ...]) -> None:
        """Refuse a chain whose model scores by an estimator that was never fitted, where none is to be fitted.

        Raises:
            CalibrationError: there is such a model.
        """
        if self.request is not None:
            return
        for part in parts_within(parts, models=models):
            own: Any = getattr(part, "estimator", None) if isinstance(part, models) else None
            if _is_unfitted(own):
                raise CalibrationError(
                    f"{type(part).__name__} scores by {own.title}, which is not fitted, so no answer would have "
                    f"a score. Pass estimator={own.name!r} here: it is then learned from a part of the examples."
                )

    def outcome(
        self,
        answered: Sequence[AnsweredExample],
        correct: Sequence[bool],
        binding: Binding,
        *,
        kinds: Sequence[str] | None = None,
        **how: Any,
    ) -> Outcome:
        """The calibration on answered and graded examples, by kind where `kinds` are given; `how` are further options
        of `calibrate`."""

        def scored(name: str) -> list[RecordedScore | None]:
            return [one.scores.get(name) for one in answered]

        def bind(estimator: Estimator) -> Binding:
            bound = next(score for score in scored(estimator.name) if score is not None)
            settings = {**bound.settings, **estimator.settings()}
            return binding.model_copy(update={"estimator": estimator.name, "settings": settings})

        names = dict.fromkeys(name for one in answered for name in one.scores)
        graded = LearningSet(
            [one.key for one in answered],
            list(correct),
            {name: [score and score.features for score in scored(name)] for name in names if name in NEEDS_LABELS},
            {name: [score and score.uncertainty for score in scored(name)] for name in names},
            [one.prompt for one in answered],
            kinds=kinds,
        )
        if self.request is None:
            own = {**graded.uncertainties, binding.estimator: [one.uncertainty for one in answered]}
            return calibrate_scored(replace(graded, uncertainties=own), binding.estimator, binding=binding, **how)
        # Copies would be on both sides of a split; of traffic, every row is a draw by itself.
        apart = graded if how.get("copies") == "keep" else graded.distinct()
        if self.request == "auto":
            return calibrate_best(apart, bind=bind, **how)
        if _is_unfitted(self.request):
            return calibrate_learned(apart, self.request, bind=bind, **how)
        return calibrate_scored(graded, self.request.name, binding=bind(self.request), **how)


def _is_unfitted(estimator: Any) -> bool:
    return isinstance(estimator, LearnedEstimator) and estimator.weights is None
