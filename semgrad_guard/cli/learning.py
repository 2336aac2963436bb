"""What `calibrate` computes for every answer, and how it gets from answers to a calibration: learned or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semgrad_guard.cli import loading

if TYPE_CHECKING:
    from semgrad_guard.decision import Binding
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.calibrating.outcome import Outcome
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.run_file import Answer


def estimators_for(name: str) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`: those of "fused" and "auto" share one replay."""
    from semgrad_guard.estimators import FusedGrad, HybridGrad
    from semgrad_guard.evaluation.calibrating.learning import CANDIDATES

    if name == "auto":
        return CANDIDATES
    return [FusedGrad(), HybridGrad()] if name == "fused" else [loading.load_estimator(name)]


def outcome_of(
    name: str,
    rows: Sequence[Question],
    answers: Sequence[Answer],
    bind: Callable[[Estimator], Binding],
    *,
    grader: str,
    alpha: float,
    delta: float,
) -> Outcome:
    """Grade the answers and calibrate; for "fused" and "auto", learn on a part of them first."""
    from semgrad_guard.estimators import FusedGrad
    from semgrad_guard.evaluation.calibrating.learning import Graded, calibrate_best, calibrate_fused
    from semgrad_guard.evaluation.calibrating.outcome import calibrate_answers
    from semgrad_guard.evaluation.graders import GRADERS

    if name == "auto":
        return calibrate_best(Graded.of(rows, answers, GRADERS[grader]), bind=bind, alpha=alpha, delta=delta)
    if name == "fused":
        graded = Graded.of(rows, answers, GRADERS[grader])
        return calibrate_fused(graded, FusedGrad(), bind=bind, alpha=alpha, delta=delta)
    (estimator,) = estimators_for(name)
    return calibrate_answers(
        rows,
        answers,
        estimator=estimator.name,
        grader=GRADERS[grader],
        binding=bind(estimator),
        alpha=alpha,
        delta=delta,
    )
