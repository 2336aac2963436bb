"""What `calibrate` computes for every answer, and how it gets from answers to a calibration: learned or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semgrad_guard.cli.estimator_spec import EstimatorSpec

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.calibrating.outcome import Outcome
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.run_file import Answer
    from semgrad_guard.records import PromptForm


def estimators_for(spec: EstimatorSpec) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`. Those of "fused" share one replay, and so do those of "auto" unless a
    setting that only some of them take tells them apart."""
    from semgrad_guard.estimators import FusedGrad, HybridGrad
    from semgrad_guard.evaluation.calibrating.learning import CANDIDATES

    if spec.name == "auto":
        return [spec.set_where_taken(candidate) for candidate in CANDIDATES]
    if spec.name == "fused":
        return [spec.set_on(FusedGrad()), spec.set_where_taken(HybridGrad())]
    return [spec.estimator()]


def outcome_of(
    spec: EstimatorSpec,
    rows: Sequence[Question],
    answers: Sequence[Answer],
    bind: Callable[[Estimator], Binding],
    *,
    grader: str,
    alpha: float,
    delta: float,
    prompts: Sequence[PromptForm],
) -> Outcome:
    """Grade the answers and calibrate; for "fused" and "auto", learn on a part of them first."""
    from semgrad_guard.estimators import FusedGrad, HybridGrad
    from semgrad_guard.evaluation.calibrating.learning import LearningSet, calibrate_best, calibrate_fused
    from semgrad_guard.evaluation.calibrating.outcome import calibrate_answers
    from semgrad_guard.evaluation.graders import GRADERS

    if spec.name == "auto":
        graded = LearningSet.of(rows, answers, GRADERS[grader], prompts=prompts)
        return calibrate_best(graded, estimators_for(spec), bind=bind, alpha=alpha, delta=delta)
    if spec.name == "fused":
        fused, instead = spec.set_on(FusedGrad()), spec.set_where_taken(HybridGrad())
        graded = LearningSet.of(rows, answers, GRADERS[grader], prompts=prompts)
        return calibrate_fused(graded, fused, instead, bind=bind, alpha=alpha, delta=delta)
    estimator = spec.estimator()
    return calibrate_answers(
        rows,
        answers,
        estimator=estimator.name,
        grader=GRADERS[grader],
        binding=bind(estimator),
        alpha=alpha,
        delta=delta,
        prompts=prompts,
    )
