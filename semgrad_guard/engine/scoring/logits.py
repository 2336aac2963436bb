"""The logits of an answer's tokens: as its generation left them, or computed again, block by block of the vocabulary.

Logits in half precision are rounded: at 16 to 32, a bfloat16 to an eighth, a probability by several per cent. So the
greatest of each token, and its target's, are computed once more in float32; over the many that are left the roundings
even out. (Vocabulary of 152,000, 15 spreads: the median entropy is then off by 2e-4 of itself or less, in place of up
to 6e-3, and 1 - p of the mode by 5e-5 or less, in place of up to 4e-2; entropies of single, nearly
certain tokens by 1e-3.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.models.architecture import LogitTransform
from semgrad_guard.engine.replay.skinny_linear import factor_dtype, precise_dtype, product
from semgrad_guard.engine.scoring.distribution import Distribution

_BLOCK = 8192  # vocabulary entries a step on a CPU, fewer where many tokens share it:
_ELEMENTS = 1 << 20  # n x block logits stay in its cache,
_FRUGAL_ELEMENTS = 1 << 18  # or take little room where so little is granted that none can be kept
_ELEMENTS_ELSEWHERE = 1 << 22  # where a step costs its launch, and there is no such cache
_REFINED = 32  # logits of a token that are computed again in float32
_CHUNK = 64  # vocabulary entries that are first searched for their greatest alone
_TOGETHER = 4  # tokens that share a pass over the whole vocabulary on a CPU: fewer calls, and still in its cache

Rows = torch.Tensor | Sequence[torch.Tensor]
"""The head's output for n tokens: [n, V], or n times [V]."""


class Logits:
    """The transformed logits of n tokens in float32 (float64 for float64).

    Iterating gives (start, [n, block]) for successive blocks of the vocabulary.
    """

    def __init__(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        head: nn.Linear,
        *,
        transform: LogitTransform,
        raw: Rows | None = None,
        kept_bytes: int = 0,
    ) -> None:
        """From the states that predict the tokens [n, d], and the tokens [n].

        `raw` is the head's output [V] for each, where a generation kept it; else it is computed, once where it stays
        within `kept_bytes`, or whenever it is asked for.
        """
        self._precise = states.to(precise_dtype(states))
        self._targets, self._head, self._transform = targets, head, transform
        n, self._vocabulary = len(states), len(head.weight)
        factor = states.to(factor_dtype(states))
        keeps = raw is None and n * self._vocabulary * factor.element_size() <= kept_bytes
        if states.device.type == "cpu":
            elements = _ELEMENTS if keeps or raw is not None else _FRUGAL_ELEMENTS
            self._size, self._at_once = max(1, min(_BLOCK, elements // n)), _TOGETHER
        else:
            self._size = max(1, _ELEMENTS_ELSEWHERE // n)
            self._at_once = max(1, _ELEMENTS_ELSEWHERE // self._vocabulary)  # tokens, over the whole vocabulary
        self._refined: _Refined | None = None
        self._kept: Rows | None = raw
        if keeps:
            self._kept = kept = factor.new_empty(n, self._vocabulary)
            for start in self._starts():
                current_stop().check()
                kept[:, start : start + self._size] = self._computed(factor, start)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in self._starts():
            current_stop().check()
            yield start, self._transform(self._block(start))

    def survey(self) -> tuple[Distribution, torch.Tensor]:
        """The tokens' distributions, and the logits of the targets [n]."""
        return self._by_block() if self._kept is None else self._by_row(self._kept)

    def _starts(self) -> range:
        return range(0, self._vocabulary, self._size)

    def _block(self, start: int) -> torch.Tensor:
        """The head's output [n, block] from vocabulary entry `start` on."""
        if self._kept is None:
            return self._computed(self._precise, start)
        z = _columns(self._kept, slice(start, start + self._size)).to(self._precise.dtype)
        if self._refined is not None:
            self._refined.put(z, start)
        return z

    def _computed(self, factor: torch.Tensor, start: int) -> torch.Tensor:
        """The same from the states, in their dtype."""
        z = product(factor, self._head.weight[start : start + self._size])
        return z if self._head.bias is None else z + self._head.bias[start : start + self._size]

    def _by_block(self) -> tuple[Distribution, torch.Tensor]:
        parts: list[Distribution] = []
        aims = torch.zeros_like(self._precise[:, 0])
        for start, logits in self:
            local = (self._targets - start)[:, None]
            inside = local.clamp(0, logits.shape[1] - 1)
            aims = torch.where(local == inside, logits.gather(1, inside), aims[:, None]).squeeze(1)
            parts.append(Distribution.of(logits, _greatest(logits, 1)))
        return reduce(Distribution.joined, parts), aims

    def _by_row(self, rows: Rows) -> tuple[Distribution, torch.Tensor]:
        """Over the whole vocabulary, a few tokens at a time."""
        parts: list[Distribution] = []
        aims: list[torch.Tensor] = []
        refined: list[_Refined] = []
        z, scratch = self._precise.new_empty(2, min(self._at_once, len(rows)), self._vocabulary)
        for begin in range(0, len(rows), len(z)):
            current_stop().check()
            kept, targets = _columns(rows[begin : begin + len(z)], slice(None)), self._targets[begin:][: len(z), None]
            some, scratch = z[: len(kept)].copy_(kept), scratch[: len(kept)]
            if kept.dtype == z.dtype:
                mode = _greatest(kept, 1)
            else:
                columns = torch.cat([_greatest(kept, min(_REFINED, self._vocabulary)), targets], dim=1)
                values = self._exact(self._precise[begin:][: len(z)], columns)
                refined.append(_Refined.of(columns, values, first=begin))
                some.scatter_(1, columns, values)
                mode = columns.gather(1, values.argmax(1, keepdim=True))
            logits = self._transform(some)
            aims.append(logits.gather(1, targets).squeeze(1))
            parts.append(Distribution.of(logits, mode, scratch=scratch))
        self._refined = _Refined.joined(refined) if refined else None
        return Distribution.stacked(parts), torch.cat(aims)

    def _exact(self, states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The head's output [m, k] for the vocabulary entries `columns` [m, k] of m tokens with `states` [m, d]."""
        weights = self._head.weight[columns].to(states.dtype)
        values = torch.bmm(weights, states[:, :, None]).squeeze(2)
        return values if self._head.bias is None else values + self._head.bias[columns]


def _columns(rows: Rows, columns: slice) -> torch.Tensor:
    """Some vocabulary entries of all rows [n, columns]."""
    return rows[:, columns] if isinstance(rows, torch.Tensor) else torch.stack([row[columns] for row in rows])


def _greatest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Where the greatest entries of each row [m, V] are: [m, count], in any order.

    They lie in the chunks with the greatest maxima: every so manyth entry is one, whose maxima a CPU finds three times
    as fast as those of neighbours. (`topk` takes six times as long over bfloat16's many equal values, and `argmax` over
    any.)
    """
    m, vocabulary = rows.shape
    if vocabulary < 2 * _CHUNK:
        return rows.topk(count).indices
    whole = vocabulary // _CHUNK * _CHUNK
    maxima = rows[:, :whole].unflatten(1, (_CHUNK, -1)).amax(1)
    chunks = maxima.topk(min(count, maxima.shape[1])).indices
    within = torch.arange(0, whole, whole // _CHUNK, device=rows.device)
    rest = torch.arange(whole, vocabulary, device=rows.device).expand(m, -1)
    places = torch.cat([(chunks[:, :, None] + within).flatten(1), rest], dim=1)
    return places.gather(1, rows.gather(1, places).topk(count).indices)


@dataclass(frozen=True)
class _Refined:
    """Single logits, in the order of the vocabulary: `values[i]` is that of token `rows[i]` at `columns[i]`."""

    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, columns: torch.Tensor, values: torch.Tensor, *, first: int) -> _Refined:
        """From columns and values [m, k] of the tokens from `first` on."""
        rows = torch.arange(first, first + len(columns), device=columns.device)
        return cls(rows.repeat_interleave(columns.shape[1]), columns.flatten(), values.flatten())

    @classmethod
    def joined(cls, parts: Sequence[_Refined]) -> _Refined:
        """Those of all parts."""
        columns, order = torch.cat([part.columns for part in parts]).sort()
        rows, values = torch.cat([part.rows for part in parts]), torch.cat([part.values for part in parts])
        return cls(rows[order], columns, values[order])

    def put(self, z: torch.Tensor, start: int) -> None:
        """Write those of the vocabulary entries from `start` on into their place in a block z [n, block]."""
        ends = torch.tensor([start, start + z.shape[1]], device=z.device)
        begin, end = torch.searchsorted(self.columns, ends).tolist()
        z[self.rows[begin:end], self.columns[begin:end] - start] = self.values[begin:end]
