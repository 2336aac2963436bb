"""Cascade: the free score decides where it leaves no doubt, and gradients are computed in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.gradients import ParaGrad, ReplayEstimator
from semgrad_guard.estimators.observed import OBSERVING, MaxProbability
from semgrad_guard.records import Score


@dataclass(frozen=True)
class Cascade(ReplayEstimator):
    """The maximum probability where it is sure either way; in between, ParaGrad's order; in [0, 1].

        S = f                              where f < low or f > high
        S = low + (high - low) g / (1 + g)     in between

    f is 1 - the geometric mean of the answer's token probabilities, g is ParaGrad. An answer outside [low, high] costs
    no more than `MaxProbability`, nothing besides generating it; of the others the output head alone is differentiated.
    A calibration treats it as one score. 0 <= low < high <= 1; docs/results/smollm2.md has the band's costs and
    gains.

    Raises:
        InputError: low and high are not such a band.
    """

    low: float = 0.1
    high: float = 0.4
    name: ClassVar[str] = "cascade"
    title: ClassVar[str] = "Cascade"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise InputError(f"Cascade needs 0 <= low < high <= 1, not low={self.low}, high={self.high}")

    @property
    def objective(self) -> Objective:
        """No hidden state is differentiated: a generation keeps the observed states, which ParaGrad reads, too."""
        return OBSERVING

    def value(self, scores: GradientScores) -> float | None:
        """The score of a part of an answer, of which everything was computed."""
        return self.of(MaxProbability().value(scores), scores.paragrad)

    def __call__(self, evidence: Evidence) -> Score:
        return evidence.together(self, self._scored)

    def _scored(self, batch: Sequence[Evidence]) -> Sequence[Score]:
        """The scores of all answers of a batch: the free ones first, which decide about the gradients of the others."""
        scores = [MaxProbability()(answer) for answer in batch]
        doubtful = [row for row, score in enumerate(scores) if self.doubts(score.uncertainty)]
        answers = [batch[row] for row in doubtful]
        if 0 < len(doubtful) < len(batch):
            answers = batch[0].scoring.part(doubtful).evidence
        for row, answer in zip(doubtful, answers, strict=True):
            gradient, milliseconds = answer.timed(partial(answer.head_gradient, ParaGrad().objective))
            if gradient is not None:
                free = scores[row]
                details = dict(free.details or {})
                spent = round(details.get("scoring_ms", 0) + milliseconds, 3)
                details |= {"paragrad": gradient.paragrad, "scoring_ms": spent}
                scores[row] = Score(self.of(free.uncertainty, gradient.paragrad), gradient.reason, details)
        return scores

    def doubts(self, free: float | None) -> bool:
        """Whether this maximum probability leaves it to the gradients."""
        return free is not None and self.low <= free <= self.high

    def of(self, free: float | None, gradient: float | None) -> float | None:
        """The score by its two parts; None where the one that decides is missing."""
        if not self.doubts(free):
            return free
        return None if gradient is None else self.low + (self.high - self.low) * gradient / (1 + gradient)
