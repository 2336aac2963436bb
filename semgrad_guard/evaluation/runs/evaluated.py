"""One answered question of an evaluation: everything that its numbers can be computed again from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.evaluation.runs.run_file import Answer


class SampleSet(BaseModel):
    """The samples that a plan drew: their texts, and the log-probability of each of their tokens (nats).

    The probabilities are those of logits divided by `temperature`, as the methods that share the plan read them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: dict[str, Any]
    temperature: float = 1.0
    texts: tuple[str, ...]
    log_probs: tuple[tuple[float | None, ...], ...]


class EvaluatedAnswer(Answer):
    """An answer with its references, its tokens, what every method measured and what that cost.

    `entropies` and `log_probs` (nats) have one entry per token of `token_ids`. `generation_ms` is the time of plain
    generation (that of the batch, divided by its `rows`), `milliseconds` what each method costs beyond it: everything
    that it needs, even if it was there already because another method needs it too (see `engine.cost_accounting`).
    `ablations` are variants of SemGrad, by name.
    """

    references: tuple[str, ...] = ()
    kind: str | None = None
    context: str | None = None
    token_ids: tuple[int, ...] = ()
    entropies: tuple[float, ...] = ()
    log_probs: tuple[float, ...] = ()
    rows: int = 1
    generation_ms: float = 0.0
    milliseconds: Mapping[str, float] = Field(default_factory=dict[str, float])
    ablations: Mapping[str, float | None] = Field(default_factory=dict[str, float | None])
    samples: tuple[SampleSet, ...] = ()

    @property
    def mean_entropy(self) -> float | None:
        """The mean of the token entropies in nats, None without any."""
        return sum(self.entropies) / len(self.entropies) if self.entropies else None
