"""The output head outside autograd: entropies, the backward seed and ParaGrad in blocks of the vocabulary.

With H the final states [n, d] of the n scored tokens, W the head [V, d] and w_t the entropy weights,

    A[t, v] = w_t (1[v = y_t] - p_tv) d logit / d z        loss = sum_t w_t log p(y_t)
    d loss / d H = A W                                      d loss / d W = A^T H

so that ParaGrad = sum |A^T H| / (V d) and the seed of the backward pass are read off one block of A at a time. Neither
V x d nor, above a small budget, n x V is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from semgrad_guard.engine.architecture import LogitTransform

_BLOCK = 4096  # vocabulary entries a step
_KEEP_BYTES = 64 << 20  # logits up to this size are kept between the two passes instead of computed again
_PRODUCT_ELEMENTS = 1 << 18  # a block of A^T H stays in a core's cache


@dataclass(frozen=True)
class HeadScores:
    """Per scored token: `entropies` and `log_probs` [n] in nats, `seed` = d loss / d H [n, d]; per answer: `paragrad`."""

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
    mode: torch.Tensor
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
) -> HeadScores:
    """Everything the head contributes to the scores of a batch of answers.

    Args:
        states: post-norm states that predict the answers' tokens [n, d], answer after answer.
        targets: those tokens [n].
        lengths: tokens of each answer; they add up to n.
        head: the output head, whose weight and bias are read only.
        transform: what the model does to the head's output before the softmax.
        averages: divide each answer's terms by its length (the official variant).
    """
    blocks = _Blocks(states, head, transform)
    distribution = _distributions(blocks)
    weights = distribution.entropies
    if averages:
        weights = weights / torch.cat([weights.new_full((n,), float(n)) for n in lengths])
    seed = torch.zeros_like(blocks.states, dtype=blocks.precision)
    paragrad = torch.zeros(len(lengths), dtype=torch.float64, device=states.device)
    target_logits = torch.zeros_like(weights)
    for start, logits in blocks:
        local = targets - start
        hit = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
        target_logits[hit] = logits[hit, local[hit]]
        sensitivity = _sensitivity(logits, start, hit, targets, weights, distribution)
        sensitivity = (sensitivity * transform.derivative(logits)).to(blocks.dtype)
        seed += (sensitivity @ blocks.weight(start)).to(blocks.precision)
        _add_absolute_products(paragrad, sensitivity, blocks.states, lengths)
    log_probs = target_logits - distribution.peak - torch.log1p(distribution.rest)
    return HeadScores(distribution.entropies, log_probs, seed, paragrad / head.weight.numel())


class _Blocks:
    """The logits [n, block] of successive vocabulary blocks; kept after the first pass if they are small enough."""

    def __init__(self, states: torch.Tensor, head: nn.Linear, transform: LogitTransform) -> None:
        # float16 would lose small probabilities and overflow sums; the head is then read in float32.
        self.dtype = torch.float32 if states.dtype == torch.float16 else states.dtype
        self.precision = torch.float64 if states.dtype == torch.float64 else torch.float32
        self.states = states.to(self.dtype).contiguous()
        self._head, self._transform = head, transform
        size = states.shape[0] * head.weight.shape[0] * self.precision.itemsize
        self._kept: dict[int, torch.Tensor] | None = {} if size <= _KEEP_BYTES else None

    def weight(self, start: int) -> torch.Tensor:
        return self._head.weight[start : start + _BLOCK].to(self.dtype)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, self._head.weight.shape[0], _BLOCK):
            yield start, self._logits(start)

    def _logits(self, start: int) -> torch.Tensor:
        if self._kept is not None and start in self._kept:
            return self._kept[start]
        bias = None if self._head.bias is None else self._head.bias[start : start + _BLOCK].to(self.dtype)
        logits = self._transform(F.linear(self.states, self.weight(start), bias).to(self.precision))
        if self._kept is not None:
            self._kept[start] = logits
        return logits


def _distributions(blocks: _Blocks) -> Distribution:
    """Mode, normaliser and entropy of each token's distribution in one pass (online log-sum-exp)."""
    n, device = blocks.states.shape[0], blocks.states.device
    peak = torch.full((n,), float("-inf"), dtype=blocks.precision, device=device)
    mode = torch.zeros(n, dtype=torch.long, device=device)
    rest, moment = torch.zeros_like(peak), torch.zeros_like(peak)  # sums of e^x and x e^x, x = logit - peak, mode left out
    for start, logits in blocks:
        block_peak, block_mode = logits.max(dim=1)
        moved = block_peak > peak
        new_peak = torch.maximum(peak, block_peak)
        shift = torch.where(torch.isinf(peak), 0.0, peak - new_peak)
        decay = torch.where(torch.isinf(peak), 0.0, shift.exp())
        demoted = moved.to(peak.dtype)  # the former mode now counts among the rest
        moment = decay * (moment + shift * (rest + demoted))
        rest = decay * (rest + demoted)
        centred = logits - new_peak[:, None]
        terms = centred.exp()
        terms[moved, block_mode[moved]] = 0.0
        rest += terms.sum(dim=1)
        moment += torch.einsum("nv,nv->n", terms, centred)
        mode = torch.where(moved, start + block_mode, mode)
        peak = new_peak
    entropies = (torch.log1p(rest) - moment / (1 + rest)).clamp_(min=0)
    return Distribution(peak, mode, rest, entropies)


def _sensitivity(
    logits: torch.Tensor,
    start: int,
    hit: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    distribution: Distribution,
) -> torch.Tensor:
    """w_t (1[v = y_t] - p_tv) for one block [n, block]; `hit` lists the tokens whose target lies in it."""
    total = 1 + distribution.rest
    block = (logits - distribution.peak[:, None]).exp_().mul_((-weights / total)[:, None])
    column = targets[hit] - start
    certain = weights[hit] * distribution.rest[hit] / total[hit]
    is_mode = targets[hit] == distribution.mode[hit]
    block[hit, column] = torch.where(is_mode, certain, weights[hit] + block[hit, column])
    return block


def _add_absolute_products(
    sums: torch.Tensor, sensitivity: torch.Tensor, states: torch.Tensor, lengths: Sequence[int]
) -> None:
    """Add each answer's sum |A^T H| over this block of A to `sums`."""
    rows = max(64, _PRODUCT_ELEMENTS // states.shape[1])
    for answer, (a, h) in enumerate(zip(sensitivity.split(list(lengths)), states.split(list(lengths)), strict=True)):
        if len(a) == 1:  # an outer product: its l1 norm factorises
            sums[answer] += a.double().abs().sum() * h.double().abs().sum()
            continue
        for part in a.t().split(rows):
            # Not torch.norm(p=1): on CPU it accumulates serially in float32 and is wrong for large tensors.
            sums[answer] += (part @ h).abs_().sum(dtype=torch.promote_types(h.dtype, torch.float32))
