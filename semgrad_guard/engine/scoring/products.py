"""The l1 (or l2) norm of the head's gradient A^T H, answer by answer, as blocks of A [n, block] pass by.

Row v of A^T H has at most the l1 norm q_v = sum_t |A_tv| ||H_t||_1. Where products are rounded to half precision, rows
are not multiplied whose q_v is less than that rounding's part of the mean one (2^-8 in bfloat16). So all of them
together are less than that part of sum q_v, too. They count as q_v times the share of the others in theirs. (Answers of
SmolLM2: a quarter of the rows is multiplied. The others are 3e-4 of the sum, and are estimated to a fifth of that.)

Why: docs/adr/0182-rows-that-rounding-would-hide.md
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semgrad_guard.engine.objective import Norm
from semgrad_guard.engine.scoring.stratified_rows import StratifiedRows

_ELEMENTS = 1 << 18  # entries of A^T H at a time: few enough to stay in a core's cache,
_HALF_ELEMENTS = 1 << 20  # or more where every product in half precision has a cost of its own,
_ELEMENTS_ELSEWHERE = 1 << 24  # or as a GPU wants them


class Products:
    """sum |A^T H| of each answer, or with "l2" the sum of squares, A arriving block by block."""

    def __init__(
        self, states: torch.Tensor, lengths: Sequence[int], norm: Norm, *, means: torch.Tensor | None = None
    ) -> None:
        """`means` [n] are, for each token, the mean of |A_tv| over v, at least."""
        self._sums = torch.zeros(len(lengths), dtype=torch.float64, device=states.device)
        self.dtype = states.dtype
        """In which A is wanted."""
        self._lengths, self._squares = list(lengths), norm == "l2"
        self._states = states.split(self._lengths)
        self._magnitudes = [self._total(h.to(torch.float64, copy=True)) for h in self._states]
        self._least: list[float] | None = None
        if means is not None and states.dtype.itemsize < 4 and norm == "l1":
            self._heights = [h.abs().sum(1, keepdim=True, dtype=torch.float32).to(h.dtype).t() for h in self._states]
            mean = [float((h[0] * m).sum()) for h, m in zip(self._heights, means.split(self._lengths), strict=True)]
            self._least = [torch.finfo(states.dtype).eps / 2 * value for value in mean]
        self._bounds = self._sums.new_zeros(len(lengths), 2)  # sums of q_v: of the rows that are multiplied, and of all
        rows = max(64, _elements_at_once(states) // states.shape[1])
        self._buffer = states.new_empty(rows, states.shape[1])

    def add(self, sensitivity: torch.Tensor) -> None:
        """Take in the next block of A [n, block]."""
        for answer, a in enumerate(sensitivity.split(self._lengths)):
            self._add(answer, a)

    def means(self, size: int) -> torch.Tensor:
        """The mean absolute value over `size` entries, or the root mean square, of each answer."""
        means = self._sums / size
        if self._least is not None:
            multiplied, every = self._bounds.unbind(1)
            means = means * torch.where(multiplied == every, 1.0, every / multiplied)
        return means.sqrt() if self._squares else means

    def errors(self, size: int) -> tuple[float | None, ...]:
        """The standard error of each mean: None, as nothing was sampled."""
        return (None,) * len(self._lengths)

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


def _elements_at_once(states: torch.Tensor) -> int:
    if states.device.type != "cpu":
        return _ELEMENTS_ELSEWHERE
    return _HALF_ELEMENTS if states.dtype.itemsize < 4 else _ELEMENTS


class SampledProducts(Products):
    """sum |A^T H| of each answer estimated from rows of it (`StratifiedRows`); answers of one token stay exact."""

    def __init__(
        self, states: torch.Tensor, lengths: Sequence[int], *, limits: torch.Tensor, draws: int, seeds: Sequence[int]
    ) -> None:
        """`limits` [n] bound sum_v |A_tv| of each token; `draws` rows are drawn for each answer, by its own seed."""
        super().__init__(states, lengths, "l1")
        self._samples = [
            StratifiedRows(h, limit, draws=draws, seed=seed) if len(h) > 1 else None
            for h, limit, seed in zip(self._states, limits.split(self._lengths), seeds, strict=True)
        ]

    def means(self, size: int) -> torch.Tensor:
        """The estimate of each answer's mean absolute value over `size` entries."""
        for answer, sample in enumerate(self._samples):
            if sample is not None:
                self._sums[answer] = sample.total
        return super().means(size)

    def errors(self, size: int) -> tuple[float | None, ...]:
        """The standard error of each mean; None where it is exact."""
        return tuple(None if sample is None else sample.error / size for sample in self._samples)

    def _add(self, answer: int, a: torch.Tensor) -> None:
        sample = self._samples[answer]
        if sample is None:
            super()._add(answer, a)
        else:
            sample.add(a, at_once=len(self._buffer))
