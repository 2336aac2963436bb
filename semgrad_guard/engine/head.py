"""The output head outside autograd: entropies, the backward seed and ParaGrad in blocks of the vocabulary.

With H the final states [n, d] of the n scored tokens, W the head [V, d] and w_t the entropy weights,

    A[t, v] = w_t (1[v = y_t] - p_tv) d logit / d z        loss = sum_t w_t log p(y_t)
    d loss / d H = A W                                      d loss / d W = A^T H

so that ParaGrad = sum |A^T H| / (V d) and the seed of the backward pass are read off one block of A at a time. Neither
V x d nor, above a small budget, n x V is ever held. (Without entropy weights, w_t = 1; with the l2 norm, ParaGrad is
the root mean square of A^T H.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from semgrad_guard.engine.architecture import LogitTransform
from semgrad_guard.engine.objective import Norm

_BLOCK = 8192  # vocabulary entries a step, fewer where many tokens share it:
_LOGIT_ELEMENTS = 1 << 18  # n x block logits stay in a core's cache
_PIECE = 256  # rows of the head converted at a time, for the same reason
_PRODUCT_ELEMENTS = 1 << 18  # and a block of A^T H
_KEEP_BYTES = 96 << 20  # logits up to this size are kept between the two passes instead of computed again


@dataclass(frozen=True)
class HeadScores:
    """Per scored token `entropies`, `log_probs` [n] in nats, `seed` = d loss / d H [n, d]; per answer `paragrad`."""

    entropies: torch.Tensor
    log_probs: torch.Tensor
    seed: torch.Tensor
    paragrad: torch.Tensor


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions by their mode: p(v) = exp(logit_v - peak) / (1 + rest), [n] each.

    `rest` sums every term but the mode's own, so that 1 - p(mode) = rest / (1 + rest) keeps its digits where the
    model is nearly certain; there the naive difference is rounding noise.
    """

    peak: torch.Tensor
    rest: torch.Tensor
    entropies: torch.Tensor


@torch.no_grad()
def score_head(
    states: torch.Tensor,
    targets: torch.Tensor,
    *,
    lengths: Sequence[int],
    head: nn.Linear,
    transform: LogitTransform,
    averages: bool,
    weighted: bool = True,
    norm: Norm = "l1",
) -> HeadScores:
    """Everything the head contributes to the scores of a batch of answers.

    Args:
        states: post-norm states that predict the answers' tokens [n, d], answer after answer.
        targets: those tokens [n].
        lengths: tokens of each answer; they add up to n.
        head: the output head, whose weight and bias are read only.
        transform: what the model does to the head's output before the softmax.
        averages: divide each answer's terms by its length (the official variant).
        weighted: weigh tokens by their entropy.
        norm: what ParaGrad takes of the head's gradient, "l1" or "l2", normalised by its size.
    """
    blocks = _Blocks(states, head, transform)
    distribution = _distributions(blocks)
    weights = distribution.entropies if weighted else torch.ones_like(distribution.entropies)
    if averages:
        weights = weights / torch.cat([weights.new_full((n,), float(n)) for n in lengths])
    seed = torch.zeros_like(blocks.states)
    products = _Products(blocks.states, lengths, norm)
    target_logits = torch.zeros_like(weights)
    for start, logits in blocks:
        local = targets - start
        hit = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
        column = local[hit]
        target_logits[hit] = logits[hit, column]
        sensitivity = _sensitivity(logits, hit, column, weights, distribution).mul_(transform.derivative(logits))
        blocks.add_back(seed, sensitivity, start)
        products.add(sensitivity)
    log_probs = target_logits - distribution.peak - torch.log1p(distribution.rest)
    return HeadScores(distribution.entropies, log_probs, seed, products.means(head.weight.numel()))


class _Blocks:
    """The logits [n, block] of successive vocabulary blocks; kept after the first pass if they are small enough."""

    def __init__(self, states: torch.Tensor, head: nn.Linear, transform: LogitTransform) -> None:
        self.precision = torch.float64 if states.dtype == torch.float64 else torch.float32
        self.states = states.to(self.precision).contiguous()
        self._factor_dtype = states.dtype if _multiplies_well(states) else self.precision
        self._factor = states.to(self._factor_dtype).t().contiguous()
        self._head, self._transform = head, transform
        n, self._vocabulary = states.shape[0], head.weight.shape[0]
        self._size = max(1, min(_BLOCK, _LOGIT_ELEMENTS // n))
        self._piece = _PIECE if states.device.type == "cpu" else self._size
        self._converted: torch.Tensor | None = None
        if head.weight.dtype != self._factor_dtype:
            shape = (min(self._piece, self._vocabulary), head.weight.shape[1])
            self._converted = torch.empty(shape, dtype=self._factor_dtype, device=states.device)
        keeps = n * self._vocabulary * self.precision.itemsize <= _KEEP_BYTES
        self._kept: dict[int, torch.Tensor] | None = {} if keeps else None

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, self._vocabulary, self._size):
            logits = None if self._kept is None else self._kept.get(start)
            if logits is None:
                logits = self._logits(start)
            if self._kept is not None:
                self._kept[start] = logits
            yield start, logits

    def add_back(self, seed: torch.Tensor, sensitivity: torch.Tensor, start: int) -> None:
        """seed += A W over the block of A that begins at vocabulary entry `start`."""
        factor = sensitivity.to(self._factor_dtype)
        for place, rows in self._rows(start):
            if rows.dtype == seed.dtype:
                seed.addmm_(factor[:, place], rows)
            else:
                seed += factor[:, place] @ rows

    def _logits(self, start: int) -> torch.Tensor:
        size = min(self._size, self._vocabulary - start)
        z = self._factor.new_empty(size, self._factor.shape[1])
        for place, rows in self._rows(start):
            torch.mm(rows, self._factor, out=z[place])  # W H^T: for few tokens BLAS takes twice as long over H W^T
        z = z.t().contiguous()
        if self._head.bias is not None:
            z += self._head.bias[start : start + size]
        return self._transform(z.to(self.precision))

    def _rows(self, start: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The head's rows of one block and their place in it; converted ones live until the next are asked for."""
        block = self._head.weight[start : start + self._size]
        if self._converted is None:
            yield slice(None), block
            return
        for begin in range(0, len(block), self._piece):
            source = block[begin : begin + self._piece]
            yield slice(begin, begin + len(source)), self._converted[: len(source)].copy_(source)


def _multiplies_well(states: torch.Tensor) -> bool:
    """Whether products in the states' own dtype are fast and safe; else they are taken in float32.

    float16 would lose small probabilities and overflow sums. CPUs without bfloat16 units take it ten times as long.
    """
    if states.dtype == torch.bfloat16 and states.device.type == "cpu":
        found = torch.cpu.get_capabilities()
        return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
    return states.dtype != torch.float16


def _distributions(blocks: _Blocks) -> Distribution:
    """Mode, normaliser and entropy of each token's distribution in one pass (online log-sum-exp)."""
    n, device = blocks.states.shape[0], blocks.states.device
    peak = torch.full((n,), float("-inf"), dtype=blocks.precision, device=device)
    # Sums of e^x and x e^x, x = logit - peak, without the terms at the peak itself (x = 0), which are counted.
    rest, moment, at_peak = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(peak)
    for _, logits in blocks:
        new_peak = torch.maximum(peak, logits.amax(dim=1))
        shift = torch.where(torch.isinf(peak), 0.0, peak - new_peak)
        decay = torch.where(torch.isinf(peak), 0.0, shift.exp())
        demoted = torch.where(new_peak > peak, at_peak, 0.0)
        moment = decay * (moment + shift * (rest + demoted))
        rest = decay * (rest + demoted)
        centred = logits - new_peak[:, None]
        terms = centred.exp()
        tops = centred == 0
        rest += terms.masked_fill_(tops, 0.0).sum(dim=1)
        moment += centred.mul_(terms).sum(dim=1)
        at_peak = at_peak - demoted + tops.sum(dim=1)
        peak = new_peak
    rest += at_peak - 1
    entropies = (torch.log1p(rest) - moment / (1 + rest)).clamp_(min=0)
    return Distribution(peak, rest, entropies)


def _sensitivity(
    logits: torch.Tensor, hit: torch.Tensor, column: torch.Tensor, weights: torch.Tensor, distribution: Distribution
) -> torch.Tensor:
    """w_t (1[v = y_t] - p_tv) for one block [n, block]; `hit` lists the tokens whose target is in a `column` of it."""
    total = 1 + distribution.rest
    block = (logits - distribution.peak[:, None]).exp_().mul_((-weights / total)[:, None])
    is_mode = logits[hit, column] == distribution.peak[hit]
    certain = weights[hit] * distribution.rest[hit] / total[hit]
    block[hit, column] = torch.where(is_mode, certain, weights[hit] + block[hit, column])
    return block


class _Products:
    """sum |A^T H| of each answer, or with "l2" the sum of squares, A arriving block by block."""

    def __init__(self, states: torch.Tensor, lengths: Sequence[int], norm: Norm) -> None:
        self._sums = torch.zeros(len(lengths), dtype=torch.float64, device=states.device)
        self._lengths, self._squares = list(lengths), norm == "l2"
        self._states = states.split(self._lengths)
        self._magnitudes = [self._total(h.to(torch.float64, copy=True)) for h in self._states]
        rows = max(64, _PRODUCT_ELEMENTS // states.shape[1])
        self._buffer = states.new_empty(rows, states.shape[1])

    def add(self, sensitivity: torch.Tensor) -> None:
        """Take in the next block of A [n, block]."""
        for answer, (a, h) in enumerate(zip(sensitivity.split(self._lengths), self._states, strict=True)):
            if len(a) == 1:  # an outer product: its norm factorises
                self._sums[answer] += self._total(a.to(torch.float64, copy=True)) * self._magnitudes[answer]
                continue
            for part in a.t().split(len(self._buffer)):
                self._sums[answer] += self._total(torch.mm(part, h, out=self._buffer[: len(part)]))

    def means(self, size: int) -> torch.Tensor:
        """The mean absolute value over `size` entries, or the root mean square, of each answer."""
        means = self._sums / size
        return means.sqrt() if self._squares else means

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all entries, which are overwritten."""
        if self._squares:
            return values.double().square().sum()  # squares of float32's small numbers vanish in float32
        # Not torch.norm(p=1): on CPU it accumulates serially in float32 and is wrong for large tensors.
        return values.abs_().sum()
