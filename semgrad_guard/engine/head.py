"""The output head outside autograd: entropies, the backward seed and ParaGrad in blocks of the vocabulary.

With H the final states [n, d] of the n scored tokens, W the head [V, d] and w_t the entropy weights,

    A[t, v] = w_t (1[v = y_t] - p_tv) d logit / d z        loss = sum_t w_t log p(y_t)
    d loss / d H = A W                                      d loss / d W = A^T H

so that ParaGrad = sum |A^T H| / (V d) and the seed of the backward pass are read off one block of A at a time. Neither
V x d nor, above a small budget, n x V is ever held. (Without entropy weights, w_t = 1; with the l2 norm, ParaGrad is
the root mean square of A^T H.) The products A^T H can be sampled (`row_sample.py`); everything else stays exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from semgrad_guard.engine.architecture import LogitTransform
from semgrad_guard.engine.few_rows import multiplies_well
from semgrad_guard.engine.objective import Norm
from semgrad_guard.engine.products import Products, SampledProducts

_BLOCK = 8192  # vocabulary entries a step, fewer where many tokens share it:
_LOGIT_ELEMENTS = 1 << 18  # n x block logits stay in a core's cache
_PIECE = 256  # rows of the head converted at a time, for the same reason


@dataclass(frozen=True)
class HeadScores:
    """Per scored token `entropies`, `log_probs` [n] in nats, `seed` = d loss / d H [n, d]; per answer `paragrad`.

    `paragrad_errors` are the standard errors of the answers' ParaGrad, None where it is exact.
    """

    entropies: torch.Tensor
    log_probs: torch.Tensor
    seed: torch.Tensor
    paragrad: torch.Tensor
    paragrad_errors: tuple[float | None, ...]


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions by their mode: p(v) = exp(logit_v - peak) / (1 + rest), [n] each.

    `rest` sums every term but the mode's own, so that 1 - p(mode) = rest / (1 + rest) keeps its digits where the
    model is nearly certain; there the naive difference is rounding noise. `aims` are the targets' logits.
    """

    peak: torch.Tensor
    rest: torch.Tensor
    entropies: torch.Tensor
    aims: torch.Tensor

    @property
    def log_probs(self) -> torch.Tensor:
        """log p(y_t)."""
        return self.aims - self.peak - torch.log1p(self.rest)

    @property
    def complements(self) -> torch.Tensor:
        """1 - p(y_t)."""
        others = 1 + self.rest - (self.aims - self.peak).exp()
        return torch.where(self.aims == self.peak, self.rest, others) / (1 + self.rest)


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
    raw_logits: Sequence[torch.Tensor] | None = None,
    kept_bytes: int = 0,
    sampled_rows: int | None = None,
    seed: int = 0,
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
        raw_logits: the head's output [V] for each of the n tokens, where a generation kept it: the head is then read
            once instead of twice.
        kept_bytes: logits up to this size are kept between the two passes over them instead of computed again.
        sampled_rows: estimate ParaGrad's l1 norm from that many draws of the vocabulary's rows, where it has more.
        seed: of the draws, which depend on it and on an answer's tokens alone, not on the batch.
    """
    blocks = _Blocks(states, head, transform, raw_logits, kept_bytes)
    distribution = _distributions(blocks, targets)
    weights = distribution.entropies if weighted else torch.ones_like(distribution.entropies)
    if averages:
        weights = weights / torch.cat([weights.new_full((n,), float(n)) for n in lengths])
    if sampled_rows is None or sampled_rows >= len(head.weight):
        products = Products(blocks.states, lengths, norm)
    else:
        limits = 2 * abs(transform.scale) * weights * distribution.complements  # sum_v |A_tv|; a soft cap lowers it
        seeds = [_seed_of(aims.tolist(), seed) for aims in targets.split(list(lengths))]
        products = SampledProducts(blocks.states, lengths, limits=limits, draws=sampled_rows, seeds=seeds)
    backward = torch.zeros_like(blocks.states)
    for start, logits in blocks:
        sensitivity = _sensitivity(logits, targets - start, weights, distribution).mul_(transform.derivative(logits))
        blocks.add_back(backward, sensitivity, start)
        products.add(sensitivity)
    means, errors = products.means(head.weight.numel()), products.errors(head.weight.numel())
    return HeadScores(distribution.entropies, distribution.log_probs, backward, means, errors)


class _Blocks:
    """The logits [n, block] of successive vocabulary blocks; kept after the first pass if they are small enough."""

    def __init__(
        self,
        states: torch.Tensor,
        head: nn.Linear,
        transform: LogitTransform,
        raw_logits: Sequence[torch.Tensor] | None,
        kept_bytes: int,
    ) -> None:
        self.precision = torch.float64 if states.dtype == torch.float64 else torch.float32
        self.states = states.to(self.precision).contiguous()
        self._factor_dtype = states.dtype if multiplies_well(states) else self.precision
        self._factor = states.to(self._factor_dtype).t().contiguous()
        self._head, self._transform = head, transform
        n, self._vocabulary = states.shape[0], head.weight.shape[0]
        self._size = max(1, min(_BLOCK, _LOGIT_ELEMENTS // n))
        self._piece = _PIECE if states.device.type == "cpu" else self._size
        self._converted: torch.Tensor | None = None
        if head.weight.dtype != self._factor_dtype:
            shape = (min(self._piece, self._vocabulary), head.weight.shape[1])
            self._converted = torch.empty(shape, dtype=self._factor_dtype, device=states.device)
        self._raw = raw_logits
        keeps = raw_logits is None and n * self._vocabulary * self.precision.itemsize <= kept_bytes
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
        if self._raw is not None:
            return self._transform(torch.stack([z[start : start + self._size] for z in self._raw]).to(self.precision))
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


def _distributions(blocks: _Blocks, targets: torch.Tensor) -> Distribution:
    """Mode, normaliser, entropy and target's logit of each token's distribution in one pass (online log-sum-exp)."""
    n, device = blocks.states.shape[0], blocks.states.device
    peak = torch.full((n,), float("-inf"), dtype=blocks.precision, device=device)
    # Sums of e^x and x e^x, x = logit - peak, without the terms at the peak itself (x = 0), which are counted.
    rest, moment, at_peak = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(peak)
    aims = torch.zeros_like(peak)
    for start, logits in blocks:
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
        local = (targets - start)[:, None]
        inside = local.clamp(0, logits.shape[1] - 1)
        aims = torch.where(local == inside, logits.gather(1, inside), aims[:, None]).squeeze(1)
    rest += at_peak - 1
    entropies = (torch.log1p(rest) - moment / (1 + rest)).clamp_(min=0)
    return Distribution(peak, rest, entropies, aims)


def _sensitivity(
    logits: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, distribution: Distribution
) -> torch.Tensor:
    """w_t (1[v = y_t] - p_tv) for one block [n, block]; `local` [n] are the targets as columns of it."""
    hit = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
    column, total = local[hit], 1 + distribution.rest
    block = (logits - distribution.peak[:, None]).exp_().mul_((-weights / total)[:, None])
    is_mode = logits[hit, column] == distribution.peak[hit]
    certain = weights[hit] * distribution.rest[hit] / total[hit]
    block[hit, column] = torch.where(is_mode, certain, weights[hit] + block[hit, column])
    return block


def _seed_of(tokens: list[int], seed: int) -> int:
    """The seed of an answer's draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {tokens}".encode()).digest()[:7])
