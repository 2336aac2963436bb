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

_BLOCK = 8192  # vocabulary entries a step on a CPU, fewer where many tokens share it:
_ELEMENTS = 1 << 22  # n x block of logits that were kept,
_FRUGAL_ELEMENTS = 1 << 18  # or of those that are computed, where so little is granted that none can be kept
_PIECE = 1 << 17  # of them those of a few tokens at a time in float32, which stay in a core's cache
_ROWS = 1 << 18  # the same of whole rows
_ELEMENTS_ELSEWHERE = 1 << 22  # where a step costs its launch, and there is no such cache
_REFINED = 32  # logits of a token that are computed again in float32
_CHUNK = 64  # vocabulary entries that are first searched for their greatest alone

Rows = torch.Tensor | Sequence[torch.Tensor]
"""The head's output for n tokens: [n, V], or n times [V]."""


class Logits:
    """The transformed logits of n tokens in float32 (float64 for float64)."""

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
        within `kept_bytes`, or whenever it is needed.
        """
        self._precise = states.to(precise_dtype(states))
        self._targets, self._head, self._transform = targets, head, transform
        n, self._vocabulary = len(states), len(head.weight)
        factor = states.to(factor_dtype(states))
        keeps = raw is None and n * self._vocabulary * factor.element_size() <= kept_bytes
        if on_cpu := states.device.type == "cpu":
            elements = _ELEMENTS if keeps or raw is not None else _FRUGAL_ELEMENTS
            self._size = max(1, min(_BLOCK, elements // n))
        else:
            self._size = max(1, _ELEMENTS_ELSEWHERE // n)
        self._at_once = max(1, (_ROWS if on_cpu else _ELEMENTS_ELSEWHERE) // self._vocabulary)
        """Tokens over the whole vocabulary,"""
        self._together = max(1, _PIECE // self._size) if on_cpu else n
        """and over a block."""
        self._refined: tuple[torch.Tensor, torch.Tensor] | None = None
        """Entries [n, k] of the vocabulary, and their logits in float32."""
        self._kept: Rows | None = raw
        if keeps:
            self._kept = kept = factor.new_empty(n, self._vocabulary)
            for columns, _ in self.blocks():
                kept[:, columns] = self._computed(factor, columns)

    def blocks(self) -> Iterator[tuple[slice, Iterator[tuple[slice, torch.Tensor]]]]:
        """Successive blocks of the vocabulary: its entries, and (tokens, logits [tokens, block]) of all tokens.

        The logits are the caller's to overwrite.
        """
        for start in range(0, self._vocabulary, self._size):
            current_stop().check()
            columns = slice(start, min(start + self._size, self._vocabulary))
            yield columns, self._pieces(columns)

    def survey(self) -> tuple[Distribution, torch.Tensor]:
        """The tokens' distributions, and the logits of the targets [n]."""
        return self._by_block() if self._kept is None else self._by_row(self._kept)[:2]

    def surveyed(self, surveys: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        """`survey` from `surveyed_step` of each token's step [n, 4]: of the head, targets alone are read."""
        peak, rest, moment, mode = surveys.unbind(1)
        aims = self._transform(self._exact(self._precise, self._targets[:, None])).squeeze(1)
        aims = torch.where(self._targets == mode, peak, aims)  # so that a nearly certain token's 1 - p keeps its digits
        return Distribution(peak, rest, moment), aims

    def _pieces(self, columns: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        n = len(self._precise)
        if self._kept is None:
            yield slice(0, n), self._transform(self._computed(self._precise, columns))
            return
        for begin in range(0, n, self._together):
            tokens = slice(begin, min(begin + self._together, n))
            z = _filled(
                self._precise.new_empty(tokens.stop - begin, columns.stop - columns.start), self._kept[tokens], columns
            )
            if self._refined is not None:
                places, values = (tensor[tokens] for tensor in self._refined)
                inside = (places >= columns.start) & (places < columns.stop)
                z[inside.nonzero()[:, 0], places[inside] - columns.start] = values[inside]
            yield tokens, self._transform(z)

    def _computed(self, factor: torch.Tensor, columns: slice) -> torch.Tensor:
        """The head's output [n, block] from the states, in their dtype."""
        z = product(factor, self._head.weight[columns])
        return z if self._head.bias is None else z + self._head.bias[columns]

    def _by_block(self) -> tuple[Distribution, torch.Tensor]:
        parts: list[Distribution] = []
        aims = torch.zeros_like(self._precise[:, 0])
        for columns, pieces in self.blocks():
            ((_, logits),) = pieces  # none are kept, so those of all tokens are computed together
            local = (self._targets - columns.start)[:, None]
            inside = local.clamp(0, logits.shape[1] - 1)
            aims = torch.where(local == inside, logits.gather(1, inside), aims[:, None]).squeeze(1)
            parts.append(Distribution.of(logits, _greatest(logits, 1)))
        return reduce(Distribution.joined, parts), aims

    def _by_row(self, rows: Rows) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """Over the whole vocabulary, a few tokens at a time; and each token's mode [n]."""
        parts: list[Distribution] = []
        aims: list[torch.Tensor] = []
        modes: list[torch.Tensor] = []
        refined: list[tuple[torch.Tensor, torch.Tensor]] = []
        z, scratch = self._precise.new_empty(2, min(self._at_once, len(rows)), self._vocabulary)
        for begin in range(0, len(rows), len(z)):
            current_stop().check()
            kept, targets = rows[begin : begin + len(z)], self._targets[begin:][: len(z), None]
            some, scratch = _filled(z[: len(kept)], kept, slice(None)), scratch[: len(kept)]
            if kept[0].dtype == z.dtype:
                mode = _greatest(some, 1)
            else:
                columns = torch.cat([_greatest(some, min(_REFINED, self._vocabulary)), targets], dim=1)
                values = self._exact(self._precise[begin:][: len(z)], columns)
                refined.append((columns, values))
                some.scatter_(1, columns, values)
                mode = columns.gather(1, values.argmax(1, keepdim=True))
            logits = self._transform(some)
            aims.append(logits.gather(1, targets).squeeze(1))
            parts.append(Distribution.of(logits, mode, scratch=scratch))
            modes.append(mode.squeeze(1))
        if refined:
            places, values = map(torch.cat, zip(*refined, strict=True))
            self._refined = places, values
        return Distribution.stacked(parts), torch.cat(aims), torch.cat(modes)

    def _exact(self, states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The head's output [m, k] for the vocabulary entries `columns` [m, k] of m tokens with `states` [m, d]."""
        # (Indexing by a matrix takes four times as long, and so does a product of several small matrices.)
        weights = self._head.weight.index_select(0, columns.flatten()).to(states.dtype)
        values = weights.view(*columns.shape, -1).mul_(states[:, None]).sum(2)
        return values if self._head.bias is None else values + self._head.bias[columns]


def surveyed_step(
    states: torch.Tensor, raw: torch.Tensor, head: nn.Linear, *, transform: LogitTransform
) -> torch.Tensor:
    """The arguments of `Logits.surveyed`, from the states [n, d] and the head's output [n, V], which need not be kept.

    Peak, rest and moment of each row's distribution, and its mode [n, 4].
    """
    unknown = torch.zeros(len(raw), dtype=torch.long, device=raw.device)  # the targets are yet to be chosen
    found, _, modes = Logits(states, unknown, head, transform=transform, raw=raw)._by_row(raw)
    return torch.stack([found.peak, found.rest, found.moment, modes.to(found.peak.dtype)], dim=1)


def _filled(z: torch.Tensor, rows: Rows, columns: slice) -> torch.Tensor:
    """`z` [n, block] with some vocabulary entries of all rows."""
    if isinstance(rows, torch.Tensor):
        return z.copy_(rows[:, columns])
    for own, row in zip(z, rows, strict=True):
        own.copy_(row[columns])
    return z


def _greatest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Where the greatest entries of each row [m, V] are: [m, count], in any order.

    They lie in the chunks with the greatest maxima, a chunk being every `stride`-th entry. (`topk` takes six times as
    long over bfloat16's many equal values, `argmax` over any, and maxima of neighbours.)
    """
    m, vocabulary = rows.shape
    if vocabulary < 2 * _CHUNK:
        return rows.topk(count).indices
    stride = vocabulary // _CHUNK
    whole = stride * _CHUNK
    chunks = rows[:, :whole].unflatten(1, (_CHUNK, stride)).amax(1).topk(min(count, stride)).indices
    within = torch.arange(0, whole, stride, device=rows.device)
    rest = torch.arange(whole, vocabulary, device=rows.device).expand(m, -1)
    places = torch.cat([(chunks[:, :, None] + within).flatten(1), rest], dim=1)
    return places.gather(1, rows.gather(1, places).topk(count).indices)


@dataclass(frozen=True)
class Distribution:
    """n distributions p(v) = exp(logit_v - peak) / (1 + rest), [n] each.

    `peak` is the logit of one token, the mode. `rest` sums every term but its own, so that 1 - p(mode) = rest / (1 +
    rest) keeps its digits where the model is nearly certain; there the naive difference is rounding noise. `moment`
    sums (logit_v - peak) exp(logit_v - peak).
    """

    peak: torch.Tensor
    rest: torch.Tensor
    moment: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, mode: torch.Tensor, *, scratch: torch.Tensor | None = None) -> Distribution:
        """That of logits [n, V], which are overwritten, as is `scratch` of the same shape.

        `mode` [n, 1] is the token whose logit is the peak, best the greatest.
        """
        peak = logits.gather(1, mode)
        centred = logits.sub_(peak)
        terms = torch.softmax(centred, 1, out=scratch)  # in less time than exp: its divisor is multiplied again
        whole = 1 / terms.gather(1, mode).squeeze(1)
        moment = centred.mul_(terms).sum(1) * whole
        return cls(peak.squeeze(1), terms.scatter_(1, mode, 0.0).sum(1) * whole, moment)

    @classmethod
    def stacked(cls, parts: Sequence[Distribution]) -> Distribution:
        """Those of all parts, one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("peak", "rest", "moment")))

    def part(self, tokens: slice) -> Distribution:
        """Those of some tokens."""
        return Distribution(self.peak[tokens], self.rest[tokens], self.moment[tokens])

    def joined(self, other: Distribution) -> Distribution:
        """The distribution over this one's tokens and the other's."""
        peak = torch.maximum(self.peak, other.peak)
        ours, theirs = self._seen_from(peak), other._seen_from(peak)
        # Every term of both but the mode's own 1, which is in the one of the higher peak (in either, at a tie).
        higher = self.peak >= other.peak
        rest = torch.where(higher, self.rest + theirs[0], other.rest + ours[0])
        return Distribution(peak, rest, ours[1] + theirs[1])

    def _seen_from(self, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of all terms, the mode's included, and the moment, both in relation to a higher peak."""
        shift = self.peak - peak
        decay = shift.exp()
        return decay * (1 + self.rest), decay * (self.moment + shift * (1 + self.rest))

    @property
    def entropies(self) -> torch.Tensor:
        """In nats."""
        return (torch.log1p(self.rest) - self.moment / (1 + self.rest)).clamp(min=0)

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """log p of the tokens with these logits, one a distribution [n]."""
        return logits - self.peak - torch.log1p(self.rest)

    def complements(self, logits: torch.Tensor) -> torch.Tensor:
        """1 - p of the tokens with these logits, one a distribution [n]."""
        others = 1 + self.rest - (logits - self.peak).exp()
        return torch.where(logits == self.peak, self.rest, others) / (1 + self.rest)
