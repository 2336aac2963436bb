"""Facts about one answer, each computed once, only when asked, and for a whole batch at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompt import Prompt
from semgrad_guard.engine.replay import Trace
from semgrad_guard.engine.scores import GradientScores
from semgrad_guard.engine.scoring import Scorer, clean_slate
from semgrad_guard.engine.token_batch import TokenBatch


@dataclass(frozen=True)
class TimedScores:
    """A row's scores, and its share of the milliseconds that its batch took to score."""

    scores: GradientScores
    milliseconds: float


class BatchScoring:
    """Scores the answers of one batch together, once per objective.

    `trace` is what the batch's generation left (KV cache and captured states); it is let go with the first scoring,
    and a second objective prefills anew.
    """

    def __init__(
        self,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        responses: Sequence[Sequence[int]],
        trace: Trace | None = None,
    ) -> None:
        self._scorer = scorer
        self._prompts = [prompt.ids for prompt in prompts]
        self._offsets = [prompt.semantic_token.offset for prompt in prompts]
        # An empty answer keeps its row with a filler token (left-padded rows must stay aligned with the trace).
        self._responses = [list(response) or [0] for response in responses]
        self._trace = trace
        self._done: dict[Objective, tuple[TimedScores, ...]] = {}

    def scores(self, objective: Objective, row: int) -> TimedScores:
        """The scores of one row; the first call scores the whole batch in one backward pass."""
        with self._scorer.lock:
            if objective not in self._done:
                self._done[objective] = self._score(objective)
            return self._done[objective][row]

    def _score(self, objective: Objective) -> tuple[TimedScores, ...]:
        began = time.perf_counter()
        with clean_slate():
            batch = TokenBatch.of(
                self._prompts, self._responses, self._offsets, self._scorer.device, objective=objective
            )
        trace, self._trace = self._trace, None
        found = self._scorer.score(batch, objective, trace)
        share = (time.perf_counter() - began) * 1000 / len(found)
        return tuple(TimedScores(scores, share) for scores in found)


@dataclass(frozen=True)
class Evidence:
    """What an estimator may ask about one answer. `response_ids` may be empty: then there is nothing to score."""

    prompt: Prompt
    response_ids: tuple[int, ...]
    scoring: BatchScoring
    row: int = 0

    def gradients(self, objective: Objective | None = None) -> TimedScores | None:
        """The gradient scores of the answer, None if it holds no token."""
        if not self.response_ids:
            return None
        return self.scoring.scores(objective or Objective(), self.row)
