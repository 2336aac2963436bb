"""A calibration made elsewhere, held against graded answers: does its promise survive these questions?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semgrad_guard.calibration import Binding, Calibration, Drift, drift
from semgrad_guard.engine.loaded_model import DEPARTURES
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.learned import LearnedEstimator
from semgrad_guard.evaluation.graded.results import Results
from semgrad_guard.guard.calibrated_estimator import estimator_of


@dataclass(frozen=True)
class Shift:
    """What a calibration lets through of `n` graded answers, how many of those are wrong, and whether scores moved."""

    n: int
    answered: int
    wrong: int
    alpha: float
    drift: Drift

    @property
    def risk(self) -> float | None:
        """The error rate among what is let through; None where nothing is."""
        return self.wrong / self.answered if self.answered else None

    @property
    def in_words(self) -> str:
        """One sentence on the promise, one on the drift check."""
        if self.risk is None:
            kept = f"nothing of {self.n} answers is let through, so the promise is kept"
        else:
            kept = f"{self.answered} of {self.n} answers are let through and {100 * self.risk:.1f}% of those are wrong"
            kept += f" (promised: at most {100 * self.alpha:g}%)"
        seen = "the scores have moved" if self.drift.moved else "no drift is seen"
        return f"{kept}; by the drift check {seen} (p = {self.drift.p_value:.2g})."


def hold_against(calibration: Calibration, results: Results) -> Shift:
    """Decide on the answers of a run as a guard with this calibration would have.

    Raises:
        BindingMismatchError: the calibration was made for another model, prompt form or settings.
        InputError: it is bound to nothing, or to a method that the run has no scores of.
    """
    bound = calibration.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits this run.")
    if bound.estimator not in results.titles:
        raise InputError(
            f"The calibration was made for {bound.estimator!r}, which this run did not measure; there are "
            f"{', '.join(results.titles)}."
        )
    estimator, run = estimator_of(calibration), results.graded_run
    bound.require(_binding(estimator, results.settings))
    answers = [results.answers[i] for i in results.kept]
    if isinstance(estimator, LearnedEstimator):
        scores = [estimator.uncertainty(answer.scores[estimator.name].features)[0] for answer in answers]
    else:
        scores = [answer.uncertainty(estimator.name) for answer in answers]
    through = [right for score, right in zip(scores, run.correct, strict=True) if calibration.lets_through(score)]
    moved = drift(scores, calibration.scores)
    return Shift(run.n, len(through), through.count(False), calibration.alpha, moved)


def _binding(estimator: Estimator, settings: Mapping[str, Any]) -> Binding:
    """What a guard's answers of this run would say of themselves (greedy runs: decoding is no part of it)."""
    stated: Mapping[str, Any] = settings["estimators"][estimator.name]
    measured = {key: value for key, value in stated.items() if key not in ("name", "title")}
    if isinstance(estimator, LearnedEstimator):  # the run kept what its weights read
        measured["weights"] = estimator.settings()["weights"]
    departures = {name: settings[name] for name in DEPARTURES if name in settings}
    return Binding(
        model=settings["model"],
        revision=settings["revision"],
        fingerprint=settings["fingerprint"],
        estimator=estimator.name,
        settings={**measured, "dtype": settings["dtype"], **departures},
        prompt_template=settings["prompt_template"],
    )
