"""Scores by one way of replaying: a tier, and whether its replays begin at t* or with the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from semgrad_guard.engine.models.architecture import LogitTransform
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.replay.replayer import Replayed, Replayer
from semgrad_guard.engine.replay.token_batch import TokenBatch
from semgrad_guard.engine.scoring.gradients import Rows, through_head, through_logits
from semgrad_guard.engine.scoring.scores import Tier

# How far two exact computations may differ in each dtype: kernels of other shapes round differently, and scores of
# nearly certain answers carry that noise (bfloat16: up to 15 % at a mean entropy of 0.3).
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
LOOSEST = 0.25
"""For any other dtype."""


@dataclass(frozen=True)
class Exactness:
    """The result of a self-check.

    `tiers` are exact, cheapest first, "full" always the last; `deviations` is how far each was off, relative to plain
    autograd. `cuts`: states before t* can be kept apart as a cache. `pads`: rows of a batch may be padded on the left.
    `plain`: replays are exact only where they keep closer to the model's own code. `transform` follows the
    head. `failure` is the reason why nothing could be compared (broken weights): then only "full" is left, the model's
    own call.
    """

    tiers: tuple[Tier, ...] = ("full",)
    deviations: Mapping[Tier, float] = field(default_factory=lambda: {"full": 0.0})
    cuts: bool = False
    pads: bool = False
    plain: bool = False
    transform: LogitTransform = field(default_factory=LogitTransform)
    failure: str | None = None

    @property
    def rank(self) -> tuple[bool, ...]:
        """Which of two findings is better: more tiers, replays from t* on, padding."""
        return "captured" in self.tiers, self.cuts and "prefix" in self.tiers, self.pads, "prefix" in self.tiers


def score_by(
    tier: Tier,
    way: Exactness,
    *,
    replayer: Replayer,
    batch: TokenBatch,
    objective: Objective,
    span: Sequence[int],
    captured: CapturedStates | None = None,
) -> Rows:
    """Score every part of every row in one tier ("captured" needs `captured`), in the way that is exact.

    Where states cannot be cut at t*, the rows are replayed one by one, from their first token on.
    """

    def from_states(batch: TokenBatch, replayed: Replayed) -> Rows:
        kept = replayer.memory.logits
        return through_head(
            batch, objective, replayed, tier, head=replayer.head, transform=way.transform, kept_bytes=kept
        )

    if tier == "captured" and captured is not None:
        return from_states(batch, replayer.captured(batch, span, captured))
    if tier == "prefix" and way.cuts:
        return from_states(batch, replayer.prefix(batch, span))
    if tier == "prefix":
        return tuple(from_states(row, replayer.whole(row, span))[0] for row in batch.rows())
    return tuple(through_logits(row, objective, replayer.full(row, span)) for row in batch.rows())
