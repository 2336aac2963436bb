"""The result of a generation: the text a user sees, the tokens that carry it, and the way to its scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.reasoning import Reasoning
from semgrad_guard.records import FinishReason


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is the visible text: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and tokens beyond a stop string do not
    count. `reasoning` is the model's thought before its answer; it is not part of `text`, and the answer after it has
    no score. Where that is None, a pair of marks with nothing between them belongs to `response_ids`, not to `text`.
    Where a stop string begins inside a token, they are the tokens of the text itself. `completion_tokens`
    counts everything the model produced, `reused_tokens` those of the prompt that an earlier generation had read (see
    `Memory.prompts`). `cut` is where the answer was cut off: after so many tokens, or at this stop string; None where
    the model ended it. `evidence` is the material of scoring; while it has not been used, it holds the answer's KV
    cache, so let generations go once they are scored.
    """

    prompt: Prompt
    text: str
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    scoring: BatchScoring = field(repr=False, compare=False)
    row: int = 0
    reused_tokens: int = 0
    cut: int | str | None = None
    reasoning: Reasoning | None = None

    @property
    def evidence(self) -> Evidence:
        """Facts about this answer, each computed once and only when needed."""
        return replace(self.scoring.evidence[self.row], cut=self.cut)
