"""What a generation leaves behind for scoring: captured while it runs, read by the replay of its upper layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from semgrad_guard.engine.replay.memory_budget import Memory
from semgrad_guard.engine.replay.prefix_cache import can_be_cut
from semgrad_guard.engine.replay.projections import Outputs, Place
from semgrad_guard.engine.replay.token_batch import TokenBatch


class Capture:
    """Keeps h^(k) at positions >= `start` while a model generates (prefill in any number of pieces, then tokens).

    It also keeps the states before the head at every step; the head's output, which spares scoring a pass through the
    head, as long as all of it stays within `logit_bytes`; and what the linear maps of the layers from k on gave, which
    spares reading their weights once more: of as many maps as `output_bytes` hold.
    """

    def __init__(self, layer: int, start: int, *, logit_bytes: int = 0, output_bytes: int = 0) -> None:
        self.layer = layer
        self._logit_bytes, self._output_bytes = logit_bytes, output_bytes
        self.start = start
        self._seen, self._first, self._shape = 0, 0, torch.Size()
        self._pieces: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] | None = []
        self._finals: list[torch.Tensor] = []
        self._outputs: dict[Place, list[tuple[torch.Tensor, int]]] = {}
        self._left_out: set[Place] = set()
        self._held = 0  # bytes of outputs

    @classmethod
    def within(cls, memory: Memory, *, layer: int, start: int) -> Capture:
        """A capture that keeps as much as `memory` allows."""
        return cls(layer, start, logit_bytes=memory.logits, output_bytes=memory.outputs)

    def skip(self, columns: int) -> None:
        """So many columns come from a cache; the first hidden states are those that follow."""
        self._seen = columns

    def __call__(self, hidden: torch.Tensor) -> None:
        self._first, self._shape = max(0, self.start - self._seen), hidden.shape[:2]
        self._seen += hidden.shape[1]
        if self._first < hidden.shape[1]:
            self._pieces.append(self._from_start(hidden))

    def see_output(self, place: Place, output: torch.Tensor) -> None:
        """Take in what a linear map gave [batch, positions, out] in the pass whose h^(k) came last."""
        if place[0] < self.layer or place in self._left_out or not self._output_bytes or output.is_inference():
            return
        if output.shape[:2] != self._shape or output.ndim != 3:
            return
        if self._first < output.shape[1]:
            piece = self._from_start(output)
            self._outputs.setdefault(place, []).append((piece, piece._version))
            self._held += piece.nbytes
        while self._held > self._output_bytes:
            place, pieces = self._outputs.popitem()
            self._left_out.add(place)
            self._held -= sum(piece.nbytes for piece, _ in pieces)

    def _from_start(self, states: torch.Tensor) -> torch.Tensor:
        # The prefill's slice is copied: a view would keep the whole prompt's states alive.
        return states[:, self._first :].detach().clone() if self._first else states.detach()

    def see_head(self, final: torch.Tensor, raw: torch.Tensor) -> None:
        """Take in the states before the head [batch, positions, d] and its output [batch, positions, V] of one step.

        The last position counts.
        """
        self._finals.append(final[:, -1].detach().clone())
        if self._steps is None:
            return
        last = raw[:, -1].detach()
        if (len(self._steps) + 1) * last.numel() * last.itemsize > self._logit_bytes:
            self._steps = None
            return
        self._steps.append(last.clone() if raw.shape[1] > 1 else last)

    def states(self) -> torch.Tensor:
        """h^(k) at every position from `start` on: [batch, positions, d]."""
        return torch.cat(self._pieces, dim=1)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """The head's output [batch, V] at every step; empty where not all of it was kept."""
        return tuple(self._steps or ())

    def finals(self) -> tuple[torch.Tensor, ...]:
        """The states before the head [batch, d] at every step."""
        return tuple(self._finals)

    def outputs(self) -> Outputs:
        """What each linear map gave at every position from `start` on: [batch, positions, out].

        Without those that gave it in another shape or number, and those whose output was changed afterwards, in place.
        """
        outputs: dict[Place, torch.Tensor] = {}
        positions = sum(piece.shape[1] for piece in self._pieces)
        for place, pieces in self._outputs.items():
            whole = sum(piece.shape[1] for piece, _ in pieces) == positions
            if whole and all(piece._version == version for piece, version in pieces):
                outputs[place] = torch.cat([piece for piece, _ in pieces], dim=1)
        return outputs


@dataclass(frozen=True)
class CapturedStates:
    """What a generation leaves behind for scoring.

    Its KV cache, h^(layer) and what the linear maps of the layers from there on gave, both from the earliest t* on, and
    the states before the head [B, d] and its output [B, V] at each step (maps and head as far as they were kept).
    `epoch` is the model's own at that time (`Scorer.epoch`; None: whichever): what another one left is of no use.
    """

    cache: Cache
    layer: int
    states: torch.Tensor
    logits: tuple[torch.Tensor, ...] = ()
    outputs: Outputs = field(default_factory=dict[Place, torch.Tensor])
    epoch: object = None
    finals: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, cache: Cache, capture: Capture, epoch: object = None) -> CapturedStates:
        """What a generation with this cache and capture left."""
        return cls(cache, capture.layer, capture.states(), capture.logits(), capture.outputs(), epoch, capture.finals())

    def fits(self, batch: TokenBatch) -> bool:
        """Whether these states reach from the batch's cut to its end, row for row (beams have more rows)."""
        if not can_be_cut(self.cache, batch.end) or len(self.states) != len(batch.segments):
            return False
        return self.begins <= batch.cut and self.begins + self.states.shape[1] >= batch.end

    def raw_logits(self, batch: TokenBatch) -> list[torch.Tensor] | None:
        """The head's output [V] for each of the batch's response tokens, row after row; None if not all were kept."""
        return _by_token(self.logits, batch)

    def final_states(self, batch: TokenBatch) -> torch.Tensor | None:
        """The states that predict the batch's response tokens [n, d], before the head; None if not all were kept."""
        kept = _by_token(self.finals, batch)
        return None if kept is None else torch.stack(kept)

    def known_outputs(self, batch: TokenBatch) -> Outputs:
        """What the linear maps gave at the columns that are replayed [B, columns, out]."""
        columns = self._replayed(batch)
        return {place: _ordinary(output[:, columns].contiguous()) for place, output in self.outputs.items()}

    def states_of(self, batch: TokenBatch) -> torch.Tensor:
        """h^(layer) at the columns that are replayed [B, columns, d]."""
        return _ordinary(self.states[:, self._replayed(batch)])

    def _replayed(self, batch: TokenBatch) -> slice:
        """The batch's columns [cut, end), counted from the first that was kept."""
        return slice(batch.cut - self.begins, batch.end - self.begins)

    @property
    def begins(self) -> int:
        """The column of the first state."""
        return self.cache.get_seq_length() - self.states.shape[1]


def _by_token(steps: Sequence[torch.Tensor], batch: TokenBatch) -> list[torch.Tensor] | None:
    """What each step left for each of the batch's response tokens, row after row."""
    if len(steps) < max(batch.lengths):
        return None
    return [steps[step][row] for row, length in enumerate(batch.lengths) for step in range(length)]


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it was made in inference mode: no gradient passes through such a one, without a word."""
    return tensor.clone() if tensor.is_inference() else tensor
