"""What `calibrate` computes for every answer, and how it gets from answers to a calibration: learned or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semgrad_guard.cli.estimator_spec import EstimatorSpec

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding
    from semgrad_guard.estimators import Estimator, HybridGrad
    from semgrad_guard.estimators.learned import LearnedEstimator
    from semgrad_guard.evaluation.calibrating.outcome import Outcome
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.runs.run_file import Answer
    from semgrad_guard.records import PromptForm


def estimators_for(spec: EstimatorSpec) -> Sequence[Estimator]:
    """The estimators behind an `--estimator`: with a learned one HybridGrad, which takes its place where it cannot be
    fitted. They share one replay unless a setting that only some of them take tells them apart."""
    from semgrad_guard.evaluation.calibrating.learned_columns import LEARNED
    from semgrad_guard.evaluation.calibrating.learning import CANDIDATES

    if spec.name == "auto":
        return [spec.set_where_taken(candidate) for candidate in CANDIDATES]
    if spec.name in LEARNED:
        return [*_learned(spec)]
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
    prompts: Sequence[PromptForm | None] | None,
) -> Outcome:
    """Grade the answers and calibrate; for a learned one and "auto", learn on a part of them first."""
    from semgrad_guard.evaluation.calibrating.learned_columns import LEARNED
    from semgrad_guard.evaluation.calibrating.learning import LearningSet, calibrate_best, calibrate_learned
    from semgrad_guard.evaluation.calibrating.outcome import calibrate_answers
    from semgrad_guard.evaluation.graders import GRADERS

    if spec.name == "auto":
        graded = LearningSet.of(rows, answers, GRADERS[grader], prompts=prompts)
        return calibrate_best(graded, estimators_for(spec), bind=bind, alpha=alpha, delta=delta)
    if spec.name in LEARNED:
        graded = LearningSet.of(rows, answers, GRADERS[grader], prompts=prompts)
        return calibrate_learned(graded, *_learned(spec), bind=bind, alpha=alpha, delta=delta)
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


def _learned(spec: EstimatorSpec) -> tuple[LearnedEstimator, HybridGrad]:
    """The learned estimator of that name, not yet fitted, and what takes its place."""
    from semgrad_guard.estimators import HybridGrad
    from semgrad_guard.evaluation.calibrating.learned_columns import LEARNED

    return spec.set_on(LEARNED[str(spec.name)]), spec.set_where_taken(HybridGrad())
