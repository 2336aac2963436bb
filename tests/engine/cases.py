"""Prompts and responses to score, and the scorer's rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import Row, Tape, read

from .oracle import Reference, reference_scores
from .tiny_models import token_ids


@dataclass(frozen=True)
class Case:
    """A prompt, a response and its t*, counted from the prompt's end."""

    prompt: list[int]
    response: list[int]
    semantic_token: int

    def reference(self, model: Any, objective: Objective, **options: Any) -> Reference:
        """The oracle's results."""
        n = objective.last_tokens
        return reference_scores(
            model,
            self.prompt,
            self.response,
            self.semantic_token if objective.token is None else objective.token,
            objective.variant,
            objective.layers,
            norm=objective.norm,
            weighted=objective.weighted,
            grid_tokens=None if n is None else min(n, len(self.prompt)),
            **options,
        )

    def row(self, objective: Objective, *, tape: Tape | None = None, **part: Any) -> Row:
        """It as a row to score; `part` as in `Row.of`."""
        return Row.of(self.prompt, self.response, self.semantic_token, objective, tape=tape, **part)


# Prompts of unequal length (one far longer than any sliding window of the tiny models), unequal responses, T = 1,
# and another t* in each row.
CASES = (
    Case(token_ids(11, 1), token_ids(4, 2), -3),
    Case(token_ids(7, 3), token_ids(1, 4), -1),
    Case(token_ids(20, 5), token_ids(6, 6), -5),
)


def scored(model: Any, cases: Sequence[Case], objective: Objective | None = None) -> list[GradientScores]:
    """The cases scored together, from no tape."""
    objective = objective or Objective()
    return scorer_of(model).score([case.row(objective) for case in cases], objective)


def taped(scorer: Scorer, rows: Sequence[Row], layer: int) -> list[Row]:
    """The rows on tapes by one pass over their texts."""
    with scorer.lock, clean_slate():
        return read(scorer.twin, rows, layer, memory=scorer.memory, epoch=scorer.epoch)
