"""The output head outside autograd: entropies, the backward seed and ParaGrad in blocks of the vocabulary.

With H the final states [n, d] of the n scored tokens, W the head [V, d] and w_t the entropy weights,

    A[t, v] = w_t (1[v = y_t] - p_tv) d logit / d z        loss = sum_t w_t log p(y_t)
    d loss / d H = A W                                      d loss / d W = A^T H

so that ParaGrad = sum |A^T H| / (V d) and the seed of the backward pass are read off one block of A at a time. Neither
V x d nor, above a small budget, n x V is ever held. (Without entropy weights, w_t = 1; with the l2 norm, ParaGrad is
the root mean square of A^T H.) The products A^T H can be sampled (`stratified_rows.py`); everything else stays exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from semgrad_guard.engine.models.architecture import LogitTransform
from semgrad_guard.engine.objective import Norm
from semgrad_guard.engine.replay.skinny_linear import add_product, factor_dtype, precise_dtype
from semgrad_guard.engine.scoring.logits import Distribution, Logits
from semgrad_guard.engine.scoring.products import Products, SampledProducts


@dataclass(frozen=True)
class HeadScores:
    """Per scored token `entropies`, `log_probs` [n] in nats, `seed` = d loss / d H [n, d]; per answer `paragrad`.

    The seed is zero where it is not wanted.
    `paragrad_errors` are the standard errors of the answers' ParaGrad, None where it is exact.
    """

    entropies: torch.Tensor
    log_probs: torch.Tensor
    seed: torch.Tensor
    paragrad: torch.Tensor
    paragrad_errors: tuple[float | None, ...]


@torch.no_grad()
def score_head(  # noqa: PLR0913  # each is a part of the formulas above, or is known beforehand
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
    backward: bool = True,
) -> HeadScores:
    """Everything the head contributes to the scores of a batch of answers.

    Args:
        states: post-norm states that predict the answers' tokens [n, d], answer after answer.
        targets: those tokens [n].
        lengths: tokens of each answer; they add up to n.
        head: the output head, whose weight and bias are read only.
        transform: the model's map from the head's output to the softmax's input.
        averages: divide each answer's terms by its length (the official variant).
        weighted: weigh tokens by their entropy.
        norm: ParaGrad's norm of the head's gradient, "l1" or "l2", normalised by its size.
        raw_logits: the head's output [V] for each of the n tokens, where a generation kept it: the head is then read
            once instead of twice.
        kept_bytes: logits up to this size are kept between the two passes over them instead of computed again.
        sampled_rows: estimate ParaGrad's l1 norm from that many draws of the vocabulary's rows, where it has more.
        seed: of the draws, which depend on it and on an answer's tokens alone, not on the batch.
        backward: whether the seed of a backward pass is wanted.
    """
    precision = precise_dtype(states)
    logits = Logits(states, targets, head, transform=transform, raw=raw_logits, kept_bytes=kept_bytes)
    distribution, aims = logits.survey()
    weights = distribution.entropies if weighted else torch.ones_like(aims)
    if averages:
        weights = weights / torch.cat([weights.new_full((n,), float(n)) for n in lengths])
    # sum_v |A_tv|, or with a soft cap its bound.
    limits = 2 * abs(transform.scale) * weights * distribution.complements(aims)
    if sampled_rows is None or sampled_rows >= len(head.weight):
        means = None if transform.softcap else limits / len(head.weight)
        products = Products(states.to(factor_dtype(states)), lengths, norm, means=means)
    else:
        seeds = [_seed_of(part.tolist(), seed) for part in targets.split(list(lengths))]
        products = SampledProducts(states.to(precision), lengths, limits=limits, draws=sampled_rows, seeds=seeds)
    by_states = torch.zeros_like(states, dtype=precision)
    for columns, pieces in logits.blocks():
        rows = head.weight[columns]
        sensitivity = states.new_empty(len(states), len(rows), dtype=products.dtype)
        for some, block in pieces:
            slopes = None if transform == LogitTransform() else transform.derivative(block)
            local = targets[some] - columns.start
            piece = _sensitivity(block, local, aims[some], weights[some], distribution.part(some))
            sensitivity[some] = piece if slopes is None else piece.mul_(slopes)
        if backward:
            add_product(by_states, sensitivity.to(factor_dtype(rows)), rows)
        products.add(sensitivity)
    means, errors = products.means(head.weight.numel()), products.errors(head.weight.numel())
    return HeadScores(distribution.entropies, distribution.log_probs(aims), by_states, means, errors)


def _sensitivity(
    logits: torch.Tensor, local: torch.Tensor, aims: torch.Tensor, weights: torch.Tensor, distribution: Distribution
) -> torch.Tensor:
    """w_t (1[v = y_t] - p_tv) for one block [n, block], which is overwritten; `local` [n] are the targets in it."""
    hit = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
    total = 1 + distribution.rest
    block = logits.sub_(distribution.peak[:, None]).exp_().mul_((-weights / total)[:, None])
    block[hit, local[hit]] = (weights * distribution.complements(aims))[hit]
    return block


def _seed_of(tokens: list[int], seed: int) -> int:
    """The seed of an answer's draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {tokens}".encode()).digest()[:7])
