"""How a calibration's estimator was chosen or fitted: kept with the threshold, and made from other answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.errors import CalibrationError
from semgrad_guard.records import FusedWeights

EstimatorName = Literal["fused", "states", "auto"]


class EstimatorChoice(BaseModel):
    """The requested estimator, the chosen one, and why.

    `asked` is a learned estimator, or the best one ("auto"); `estimator` the name of the one that the threshold belongs
    to, and `reason` why it is that one. `weights` are the numbers of a fitted one. `aurocs` compares the candidates on
    the answers that were learned from (a fitted one on those that it was not fitted on). `questions` names these
    answers' questions: the threshold must be chosen on others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    asked: EstimatorName  # a field of files
    estimator: str
    reason: str
    weights: FusedWeights | None = None
    aurocs: dict[str, float | None] = Field(default_factory=dict)
    questions: tuple[str, ...] = ()
    split_seed: int = 0

    def require_others(self, questions: Iterable[str]) -> None:
        """Raise unless these questions, on which a threshold is to be chosen, were not learned from.

        An estimator looks better on the answers that it was fitted on than on any others, so a threshold chosen there
        lets through more than it promises.
        """
        seen = set(self.questions) & set(questions)
        if seen:
            raise CalibrationError(
                f"{len(seen)} of the questions were used to choose or fit the estimator ({self.estimator}). The "
                "threshold must be chosen on others, or its promise does not hold: split them, or label new ones."
            )
