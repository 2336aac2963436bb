"""From the answers of a run to a calibration: graded, measured, bound to what made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.calibration import Binding, Calibration, EngineAnswers, calibrate
from semgrad_guard.evaluation.metrics import aurc, auroc
from semgrad_guard.evaluation.metrics.effect import Effect
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.records import PromptForm


@dataclass(frozen=True)
class Outcome:
    """Graded answers and the calibration made from them; `uncertainties` and `correct` are in the questions' order.

    Of several engines' answers, they are those of the engine that the calibration's numbers are about.
    """

    calibration: Calibration
    uncertainties: list[float | None]
    correct: list[bool]

    @property
    def auroc(self) -> float | None:
        """P(a wrong answer is less certain than a right one); None where all are right, or all wrong."""
        return auroc(self.uncertainties, self.correct)

    @property
    def effect(self) -> Effect:
        """What the threshold does to these answers."""
        return Effect.of(zip(self.uncertainties, self.correct, strict=True), self.calibration.lets_through)

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
    also: Sequence[EngineAnswers] = (),
) -> Outcome:
    """Calibrate on the graded answers of a run, and where there are any on those of other engines (`also`).

    `estimator` is the name that the run gave to the estimator to use, `correct` are the grades in order, `grader` is
    whose they are: a name for the binding. A question that could not be asked counts as unscored and wrong. `prompts`
    are what the questions' prompts looked like (`Phrasing.forms`); nothing is promised without them.
    """
    own = EngineAnswers(
        [answer.uncertainty(estimator) for answer in answers],
        list(correct),
        [answer.key for answer in answers],
        binding.model_copy(update={"grader": grader}),
    )
    found = calibrate(
        own.uncertainties,
        own.correct,
        groups=own.groups,
        binding=own.binding,
        alpha=alpha,
        delta=delta,
        prompts=prompts,
        also=also,
    )
    named = None if found.binding is None else found.binding.engine
    shown = next((each for each in also if each.binding.engine == named), own)
    return Outcome(found, list(shown.uncertainties), list(shown.correct))
