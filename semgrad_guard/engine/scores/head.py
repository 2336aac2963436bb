"""The output head outside autograd: entropies, the backward seed and ParaGrad in blocks of the vocabulary.

With H the final states [n, d] of the n scored tokens, W the head [V, d] and w_t the entropy weights,

    A[t, v] = w_t (1[v = y_t] - p_tv) d logit / d z        loss = sum_t w_t log p(y_t)
    d loss / d H = A W                                      d loss / d W = A^T H

so that ParaGrad = sum |A^T H| / (V d) and the seed of the backward pass are read off one block of A at a time. Neither
V x d nor, above a small budget, n x V is ever held. (Without entropy weights, w_t = 1; with the l2 norm, ParaGrad is
the root mean square of A^T H.)

Row v of A^T H has at most the l1 norm q_v = sum_t |A_tv| ||H_t||_1. Rows are not multiplied whose q_v is less than a
part of the mean one that rounding would hide: 2^-8 in bfloat16, 2^-14 in float32. So all of them together are less than
that part of sum q_v, too. They count as q_v times the share of the others in theirs. (Answers of SmolLM2: a fifth of
the rows is multiplied in bfloat16, and the others are 3e-4 of the sum; in float32 three fifths, and 6e-6. They are
estimated to a twentieth of that: float32's own rounding of A is as great.)

Logits in half precision are rounded: at 16 to 32, a bfloat16 to an eighth, a probability by several per cent. So the
greatest of each token, and its target's, are computed once more in float32; over the many that are left the roundings
even out. (Vocabulary of 152,000, 15 spreads: the median entropy is then off by 2e-4 of itself or less, in place of up
to 6e-3, and 1 - p of the mode by 5e-5 or less, in place of up to 4e-2; entropies of single, nearly
certain tokens by 1e-3.)

CPUs without instructions for a half-precision dtype multiply it at a fraction of their rate (34 rows: bfloat16 11.6 ms,
float16 backward 274 ms); there the weights are converted to float32 piece by piece in a core's cache (5.2 ms and
3.7 ms), and the result is rounded as the library's would be.

Why: docs/decisions.md#0182
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import LogitTransform, Norm, Objective


@dataclass(frozen=True)
class HeadScores:
    """Per scored token `entropies`, `log_probs` [n] in nats, `seed` = d loss / d H [n, d]; per answer `paragrad`."""

    entropies: torch.Tensor
    log_probs: torch.Tensor
    seed: torch.Tensor
    paragrad: torch.Tensor


@torch.no_grad()
def score_head(
    states: torch.Tensor,
    targets: torch.Tensor,
    *,
    lengths: Sequence[int],
    head: nn.Linear,
    transform: LogitTransform,
    objective: Objective,
    raw_logits: Sequence[torch.Tensor] | None = None,
    kept_bytes: int = 0,
) -> HeadScores:
    """Everything the head contributes to the scores of a batch of answers.

    Args:
        states: post-norm states that predict the answers' tokens [n, d], answer after answer.
        targets: those tokens [n].
        lengths: tokens of each answer; they add up to n.
        head: the output head, whose weight and bias are read only.
        transform: the model's map from the head's output to the softmax's input.
        objective: whether terms are weighted and averaged, and ParaGrad's norm.
        raw_logits: the head's output [V] for each of the n tokens, where a generation kept it: the head is then read
            once instead of twice.
        kept_bytes: logits up to this size are kept between the two passes over them instead of computed again.
    """
    logits = Logits(states, targets, head, transform=transform, raw=raw_logits, kept_bytes=kept_bytes)
    distribution, aims = logits.survey()
    weights = distribution.entropies if objective.weighted else torch.ones_like(aims)
    if objective.averages:
        weights = weights / torch.cat([weights.new_full((n,), float(n)) for n in lengths])
    # sum_v |A_tv|, or with a soft cap its bound.
    limits = 2 * abs(transform.scale) * weights * distribution.complements(aims)
    means = None if transform.softcap else limits / len(head.weight)
    products = Products(states.to(factor_dtype(states)), lengths, objective.norm, means=means)
    by_states = torch.zeros_like(states, dtype=precise_dtype(states))
    shares, own_shares = (-weights / (1 + distribution.rest))[:, None], weights * distribution.complements(aims)
    for columns in logits.columns():
        rows, block, local = head.weight[columns], logits.block(columns), targets - columns.start
        slopes = None if transform == LogitTransform() else transform.derivative(block)
        hit = ((local >= 0) & (local < len(rows))).nonzero().squeeze(1)
        sensitivity = block.sub_(distribution.peak[:, None]).exp_().mul_(shares)
        sensitivity[hit, local[hit]] = own_shares[hit]
        sensitivity = (sensitivity if slopes is None else sensitivity.mul_(slopes)).to(products.dtype)
        add_product(by_states, sensitivity.to(factor_dtype(rows)), rows)
        products.add(sensitivity)
    return HeadScores(
        distribution.entropies, distribution.log_probs(aims), by_states, products.results(head.weight.numel())
    )


_PRODUCTS = 1 << 18  # entries of A^T H at a time: few enough to stay in a core's cache
_HALF_PRODUCTS = 1 << 20  # more in half precision, where every product has a cost of its own
_PRODUCTS_ELSEWHERE = 1 << 24  # on a GPU
_HIDDEN = {torch.bfloat16: 2**-8, torch.float32: 2**-14}
"""The part of the mean bound of a row of A^T H below which rounding would hide the row, where products are taken so."""


class Products:
    """sum |A^T H| of each answer, or with "l2" the sum of squares, A arriving block by block in `dtype`.

    `means` [n] are, for each token, the mean of |A_tv| over v, at least.
    """

    def __init__(
        self, states: torch.Tensor, lengths: Sequence[int], norm: Norm, *, means: torch.Tensor | None = None
    ) -> None:
        self.dtype, self._squares = states.dtype, norm == "l2"
        self._lengths, self._states = list(lengths), states.split(list(lengths))
        self._sums = torch.zeros(len(lengths), dtype=torch.float64, device=states.device)
        self._bounds = self._sums.new_zeros(len(lengths), 2)  # sums of q_v: of the rows that are multiplied, and of all
        self._magnitudes = [self._total(h.to(torch.float64, copy=True)) for h in self._states]
        part = _HIDDEN.get(states.dtype)
        self._least: list[float] | None = None
        if means is not None and part is not None and not self._squares:
            self._heights = [h.abs().sum(1, keepdim=True, dtype=torch.float32).to(h.dtype).t() for h in self._states]
            pairs = zip(self._heights, means.split(self._lengths), strict=True)
            self._least = [part * float((heights[0] * own).sum()) for heights, own in pairs]
        elements = _HALF_PRODUCTS if states.dtype.itemsize < 4 else _PRODUCTS
        elements = elements if states.device.type == "cpu" else _PRODUCTS_ELSEWHERE
        self._buffer = states.new_empty(max(64, elements // states.shape[1]), states.shape[1])

    def add(self, sensitivity: torch.Tensor) -> None:
        """Take in the next block of A [n, block]."""
        for answer, a in enumerate(sensitivity.split(self._lengths)):
            self._add(answer, a)

    def results(self, size: int) -> torch.Tensor:
        """The mean absolute value over `size` entries, or the root mean square, of each answer."""
        means = self._sums / size
        multiplied, every = self._bounds.unbind(1)
        means = means * torch.where(multiplied == every, 1.0, every / multiplied)
        return means.sqrt() if self._squares else means

    def _add(self, answer: int, a: torch.Tensor) -> None:
        h = self._states[answer]
        if len(a) == 1:  # an outer product: its norm factorises
            self._sums[answer] += self._total(a.to(torch.float64, copy=True)) * self._magnitudes[answer]
            return
        if self._least is not None:
            bounds = torch.mm(self._heights[answer], a.abs())[0].float()
            counts = bounds >= self._least[answer]
            self._bounds[answer] += torch.stack([torch.dot(bounds, counts.float()), bounds.sum()])
            a = a.index_select(1, counts.nonzero().squeeze(1))
        for part in a.t().split(len(self._buffer)):
            self._sums[answer] += self._total(torch.mm(part, h, out=self._buffer[: len(part)]))

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all entries, which are overwritten."""
        if self._squares:
            return values.double().square().sum()  # squares of float32's small numbers vanish in float32
        # Not torch.norm(p=1): on CPU it accumulates serially in float32 and is wrong for large tensors. (In bfloat16
        # a row's sum is taken in float32 and rounded; over a vocabulary of rows that evens out.)
        return values.abs_().sum(-1).sum(dtype=torch.float64)


_BLOCK = 8192  # vocabulary entries a step on a CPU, fewer where many tokens share it:
_CACHED = 1 << 18  # logits in float32 that stay in a core's cache
_ELEMENTS = 1 << 22  # logits of a step on a GPU, where one costs its launch, and of whole rows that are computed
_REFINED = 32  # logits of a token that are computed again in float32

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
        self._states = states.to(precise_dtype(states))
        self._targets, self._head, self._transform = targets, head, transform
        n, self._vocabulary = len(states), len(head.weight)
        factor = states.to(factor_dtype(states))
        if raw is None and n * self._vocabulary * factor.element_size() <= kept_bytes:
            raw = self._computed(factor, slice(None))
        self._kept = raw
        self._refined: tuple[torch.Tensor, torch.Tensor] | None = None
        """Entries [n, k] of the vocabulary, and their logits in float32."""
        on_cpu = states.device.type == "cpu"
        self._size = max(1, min(_BLOCK, _CACHED // n) if on_cpu else _ELEMENTS // n)
        """Vocabulary entries of a block."""
        self._at_once = max(1, (_CACHED if on_cpu and raw is not None else _ELEMENTS) // self._vocabulary)
        """Tokens whose logits over the whole vocabulary are taken together."""

    def columns(self) -> Iterator[slice]:
        """Successive blocks of the vocabulary."""
        for start in range(0, self._vocabulary, self._size):
            current_stop().check()
            yield slice(start, min(start + self._size, self._vocabulary))

    def block(self, columns: slice) -> torch.Tensor:
        """The logits over a block [n, block], which are the caller's to overwrite."""
        z = self._raw(slice(None), columns)
        if self._refined is not None:
            places, values = self._refined
            inside = (places >= columns.start) & (places < columns.stop)
            z[inside.nonzero()[:, 0], places[inside] - columns.start] = values[inside]
        return self._transform(z)

    def survey(self) -> tuple[Distribution, torch.Tensor]:
        """The tokens' distributions, and the logits of the targets [n]."""
        parts: list[Distribution] = []
        aims: list[torch.Tensor] = []
        refined: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_rounded = self._kept is not None and self._kept[0].dtype != self._states.dtype
        for begin in range(0, len(self._states), self._at_once):
            current_stop().check()
            tokens = slice(begin, begin + self._at_once)
            z, targets = self._raw(tokens, slice(None)), self._targets[tokens, None]
            if is_rounded:
                columns = torch.cat([greatest(z, min(_REFINED, self._vocabulary)), targets], dim=1)
                values = self._exact(self._states[tokens], columns)
                refined.append((columns, values))
                z.scatter_(1, columns, values)
                modes = columns.gather(1, values.argmax(1, keepdim=True))
            else:
                modes = greatest(z, 1)
            logits = self._transform(z)
            aims.append(logits.gather(1, targets).squeeze(1))
            parts.append(Distribution.of(logits, modes))
        if refined:
            places, values = map(torch.cat, zip(*refined, strict=True))
            self._refined = places, values
        return Distribution.stacked(parts), torch.cat(aims)

    def _raw(self, tokens: slice, columns: slice) -> torch.Tensor:
        """The head's output for some tokens and entries of the vocabulary, in float32, as a copy."""
        if self._kept is None:
            return self._computed(self._states[tokens], columns)
        kept = self._kept[tokens]
        if isinstance(kept, torch.Tensor):
            return kept[:, columns].to(self._states.dtype, copy=True)
        z = self._states.new_empty(len(kept), len(kept[0][columns]))
        for own, row in zip(z, kept, strict=True):
            own.copy_(row[columns])
        return z

    def _computed(self, factor: torch.Tensor, columns: slice) -> torch.Tensor:
        """The head's output [n, block] from the states, in their dtype."""
        z = product(factor, self._head.weight[columns])
        return z if self._head.bias is None else z + self._head.bias[columns]

    def _exact(self, states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The head's output [m, k] for the vocabulary entries `columns` [m, k] of m tokens with `states` [m, d]."""
        # (Indexing by a matrix takes four times as long, and so does a product of several small matrices.)
        weights = self._head.weight.index_select(0, columns.flatten()).to(states.dtype)
        values = weights.view(*columns.shape, -1).mul_(states[:, None]).sum(2)
        return values if self._head.bias is None else values + self._head.bias[columns]


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
    def of(cls, logits: torch.Tensor, mode: torch.Tensor) -> Distribution:
        """That of logits [n, V], which are overwritten; `mode` [n, 1] is the token whose logit is the greatest."""
        peak = logits.gather(1, mode)
        centred = logits.sub_(peak)
        terms = torch.softmax(centred, 1)  # in less time than exp: its divisor is multiplied again
        whole = 1 / terms.gather(1, mode).squeeze(1)
        moment = centred.mul_(terms).sum(1) * whole
        return cls(peak.squeeze(1), terms.scatter_(1, mode, 0.0).sum(1) * whole, moment)

    @classmethod
    def stacked(cls, parts: Sequence[Distribution]) -> Distribution:
        """Those of all parts, one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("peak", "rest", "moment")))

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


# Products with weights in half precision, and the greatest of many entries.

_PIECE = 1 << 18  # entries of a weight converted at a time
_UNITS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
"""The names of an x86 processor's instructions for a half-precision dtype."""


@cache
def _capabilities() -> Mapping[str, Any]:
    """The CPU's, read once: every product wants to know."""
    return torch.cpu.get_capabilities()


def lacks_units(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device is an x86 processor without instructions for that half-precision dtype.

    There products of several rows take up to seven times as long as in float32 (measured with 40 rows).
    """
    known = device.type == "cpu" and _capabilities().get("architecture") == "x86_64"
    return known and dtype in _UNITS and not _has_units(dtype)


def _has_units(dtype: torch.dtype) -> bool:
    return any(_capabilities().get(unit) for unit in _UNITS[dtype])


def factor_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products with it are taken: its own where they are fast and safe, else float32.

    float16 would lose small probabilities and overflow sums. CPUs without bfloat16 units take it ten times as long.
    """
    is_slow = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not _has_units(tensor.dtype)
    return torch.float32 if is_slow or tensor.dtype == torch.float16 else tensor.dtype


def precise_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which exponentials and sums over it are taken."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [n, out] for x [n, in] and a weight [out, in], in x's dtype."""
    pieces = [torch.mm(x, rows.t()) for _, rows in _converted(weight, x.dtype)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def add_product(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """total [n, in] += gradient [n, out] W, the products in the gradient's dtype."""
    for place, rows in _converted(weight, gradient.dtype):
        if gradient.dtype == total.dtype:
            total.addmm_(gradient[:, place], rows)
        else:
            total += gradient[:, place] @ rows


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient [n, in] with respect to x, from that with respect to x W^T [n, out]."""
    if factor_dtype(weight) == weight.dtype or weight.device.type != "cpu":
        return gradient @ weight
    total = torch.zeros(gradient.shape[0], weight.shape[1])
    add_product(total, gradient.float(), weight)
    return total.to(gradient.dtype)


def _converted(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of a weight [out, in] in `dtype` and their place: all of them, where that is their own dtype.

    Else, on a CPU, few enough at a time to stay in a core's cache; each piece lives until the next is taken.
    """
    if weight.dtype == dtype or weight.device.type != "cpu":
        yield slice(None), weight.to(dtype)
        return
    rows = max(1, _PIECE // weight.shape[1])
    buffer = torch.empty(min(rows, len(weight)), weight.shape[1], dtype=dtype)
    for begin in range(0, len(weight), rows):
        source = weight[begin : begin + rows]
        yield slice(begin, begin + len(source)), buffer[: len(source)].copy_(source)


_CHUNK = 64  # vocabulary entries that are first searched for their greatest alone


def greatest(rows: torch.Tensor, count: int) -> torch.Tensor:
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
