"""What a generation leaves behind for scoring: captured while it runs, read by the replay of its upper layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from semgrad_guard.engine.prefix_cache import can_be_cut
from semgrad_guard.engine.token_batch import TokenBatch

_EXACT = (torch.float32, torch.float64)


class Capture:
    """Keeps h^(k) at positions >= `start` while a model generates (prefill in any number of pieces, then tokens).

    It also keeps the head's output at every step, which spares scoring a pass through the head, as long as all of it
    stays within `logit_bytes`. In half precision it does not: at logits of 16 to 32 a bfloat16 is rounded to an eighth.
    """

    def __init__(self, layer: int, start: int, *, logit_bytes: int = 0) -> None:
        self.layer = layer
        self._logit_bytes = logit_bytes
        self.start = start
        self._seen = 0
        self._pieces: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] | None = []

    def skip(self, columns: int) -> None:
        """So many columns come from a cache; the first hidden states are those that follow."""
        self._seen = columns

    def __call__(self, hidden: torch.Tensor) -> None:
        first = max(0, self.start - self._seen)
        self._seen += hidden.shape[1]
        if first < hidden.shape[1]:
            # The prefill's slice is copied: a view would keep the whole prompt's states alive.
            self._pieces.append(hidden[:, first:].detach().clone() if first else hidden.detach())

    def see_logits(self, raw: torch.Tensor) -> None:
        """Take in the head's output [batch, positions, V] of one step, of which the last position counts."""
        if self._steps is None:
            return
        last = raw[:, -1].detach()
        if raw.dtype not in _EXACT or (len(self._steps) + 1) * last.numel() * last.itemsize > self._logit_bytes:
            self._steps = None
            return
        self._steps.append(last.clone() if raw.shape[1] > 1 else last)

    def states(self) -> torch.Tensor:
        """h^(k) at every position from `start` on: [batch, positions, d]."""
        return torch.cat(self._pieces, dim=1)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """The head's output [batch, V] at every step; empty where not all of it was kept."""
        return tuple(self._steps or ())


@dataclass(frozen=True)
class Trace:
    """What a generation leaves behind for scoring.

    Its KV cache, h^(layer) from the earliest t* on, and the head's output [B, V] at each step (empty if not kept).
    """

    cache: Cache
    layer: int
    states: torch.Tensor
    logits: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, cache: Cache, capture: Capture) -> Trace:
        """What a generation with this cache and capture left."""
        return cls(cache, capture.layer, capture.states(), capture.logits())

    def fits(self, batch: TokenBatch) -> bool:
        """Whether these states reach from the batch's cut to its end, row for row (beams have more rows)."""
        if not can_be_cut(self.cache, batch.end) or len(self.states) != len(batch.segments):
            return False
        return self.begins <= batch.cut and self.begins + self.states.shape[1] >= batch.end

    def raw_logits(self, batch: TokenBatch) -> list[torch.Tensor] | None:
        """The head's output [V] for each of the batch's response tokens, row after row; None if not all were kept."""
        if len(self.logits) < max(batch.lengths):
            return None
        return [self.logits[step][row] for row, length in enumerate(batch.lengths) for step in range(length)]

    @property
    def begins(self) -> int:
        """The column of the first state."""
        return self.cache.get_seq_length() - self.states.shape[1]
