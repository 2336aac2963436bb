"""What comes out of a generation: the text a user sees, the tokens that carry it, and the way to its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.records import FinishReason


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is what the user sees: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and tokens wholly beyond a stop string do not
    count. `completion_tokens` counts everything the model produced, `reused_tokens` those of the prompt that an earlier
    generation had read (see `Memory.prompts`). `evidence` is what scoring needs; while it has
    not been used, it holds the answer's KV cache, so let generations go once they are scored.
    """

    prompt: Prompt
    text: str
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    scoring: BatchScoring = field(repr=False, compare=False)
    row: int = 0
    reused_tokens: int = 0

    @property
    def evidence(self) -> Evidence:
        """Facts about this answer, each computed once and only when asked."""
        return Evidence(self.prompt, self.response_ids, self.scoring, self.row)


def visible(ids: Sequence[int], stop: Sequence[str], decode: Any) -> tuple[str, int, bool]:
    """The text before the first stop string, the number of tokens that carry it, and whether a stop string cut it."""
    text: str = decode(ids)
    ends = [at for at in map(text.find, stop) if at >= 0]
    if not ends:
        return text, len(ids), False
    end = min(ends)
    count = next(n for n in range(len(ids) + 1) if len(decode(ids[:n])) >= end)
    return text[:end], count if end else 0, True
