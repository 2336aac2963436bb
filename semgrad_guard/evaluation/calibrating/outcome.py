"""From the answers of a run to a calibration: graded, measured, bound to what made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.evaluation.metrics import aurc, auroc
from semgrad_guard.evaluation.runs.run_file import Answer
from semgrad_guard.records import PromptForm


@dataclass(frozen=True)
class Outcome:
    """Graded answers and the calibration made from them; `uncertainties` and `correct` are in the questions' order."""

    calibration: Calibration
    uncertainties: list[float | None]
    correct: list[bool]

    @property
    def auroc(self) -> float | None:
        """P(a wrong answer is less certain than a right one); None where all are right, or all wrong."""
        return auroc(self.uncertainties, self.correct)

    @property
    def aurc(self) -> float | None:
        """Mean selective risk; None where no answer has a score."""
        return aurc(self.uncertainties, self.correct)


def calibrate_answers(
    answers: Sequence[Answer],
    *,
    estimator: str,
    correct: Sequence[bool],
    grader: str,
    binding: Binding,
    alpha: float,
    delta: float,
    prompts: Sequence[PromptForm | None] | None = None,
) -> Outcome:
    """Calibrate on the graded answers of a run.

    `estimator` is the name that the run gave to the estimator to use, `correct` are the grades in order, `grader` is
    whose they are: a name for the binding. A question that could not be asked counts as unscored and wrong. `prompts`
    are what the questions' prompts looked like (`run.prompt_forms`); nothing is promised without them.
    """
    uncertainties = [answer.uncertainty(estimator) for answer in answers]
    labels = list(correct)
    bound = binding.model_copy(update={"grader": grader})
    found = calibrate(uncertainties, labels, alpha=alpha, delta=delta, binding=bound, prompts=prompts)
    return Outcome(found, uncertainties, labels)
