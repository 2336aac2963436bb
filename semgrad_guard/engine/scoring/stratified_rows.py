"""sum |A^T H| of one answer from a sample of the rows of A^T H, unbiased and with its standard error.

Row v has the norm r_v = ||sum_t A_tv H_t||_1 and the cheap bound q_v = sum_t |A_tv| ||H_t||_1 >= r_v. Laid end
to end as intervals of length q_v, the rows cover [0, Q), and with share(x) = r_v / q_v at every x within row v

    sum_v r_v = integral of share(x) dx over [0, Q).

The line is divided into cells of width w, and share is looked up at k independent uniform points of each cell: drawing
with probability proportional to size (Hansen and Hurwitz, Ann. Math. Statist. 14, 1943, 333-362), stratified (Cochran,
Sampling Techniques, 1977, chapters 5 and 9A). With the mean m_c and the sample variance v_c of a cell's shares

    estimate = w sum_c m_c        variance of the estimate, itself estimated without bias = w^2 sum_c v_c / k.

Nothing about Q needs to be known but an upper bound, which sets w: points beyond Q find nothing and count as zero, as
they should. Many cells make the estimate better, many draws in a cell the knowledge of its error: where a cell lies
in two rows, two draws often find the same one and see no difference. Rows that together take up less than a draw or two
of the line can still go unseen; they change the estimate by less than the draw's part of it, 1 / draws.
"""

from __future__ import annotations

import math

import torch

_DRAWS_PER_CELL = 8
"""With one or two draws a cell the standard error is deceptive; with one cell the error is two to five times larger."""


class StratifiedRows:
    """The estimate for one answer of T tokens, blocks of A [T, block] arriving in the order of the vocabulary."""

    def __init__(self, states: torch.Tensor, limits: torch.Tensor, *, draws: int, seed: int) -> None:
        """Settle where to look.

        Args:
            states: H [T, d].
            limits: upper bounds of sum_v |A_tv| [T]. The closer they are, the more of the draws find a row.
            draws: points over the length that the bounds allow, at least 2; rounded up to full cells.
            seed: of a generator of its own.
        """
        self._states = states
        self._magnitudes = states.double().abs().sum(dim=1)
        self._per_cell = min(draws, _DRAWS_PER_CELL)
        cells = math.ceil(draws / self._per_cell)
        self._width = float((limits.double() * self._magnitudes).sum()) / cells
        self._magnitudes = self._magnitudes.to(states.dtype)
        # Beyond the last cell, where rounding in the sums of q_v may take them.
        cells += 1 + cells // 1000
        uniform = torch.rand(cells, self._per_cell, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        within = uniform.sort(dim=1).values  # so that the points of all cells ascend
        points = (torch.arange(cells)[:, None] + within) * self._width
        self._points = points.flatten().to(states.device)
        self._shares = torch.zeros_like(self._points)
        self._passed = torch.zeros((), dtype=torch.float64, device=states.device)
        self._next = 0

    def add(self, sensitivity: torch.Tensor, *, at_once: int) -> None:
        """Take in the next block of A [T, block]; products are made for `at_once` rows at a time."""
        if not math.isfinite(self._width):
            return
        bounds = self._magnitudes @ sensitivity.abs()
        ends = bounds.cumsum(0, dtype=torch.float64) + self._passed
        first, self._next, self._passed = self._next, int(torch.searchsorted(self._points, ends[-1])), ends[-1]
        if first == self._next:
            return
        places = torch.searchsorted(ends, self._points[first : self._next], right=True)
        rows, row_of_point = torch.unique_consecutive(places, return_inverse=True)
        pieces = sensitivity.index_select(1, rows).t().split(at_once)
        norms = torch.cat([torch.mm(piece, self._states).abs_().sum(dim=1) for piece in pieces])
        self._shares[first : self._next] = (norms / bounds[rows]).double()[row_of_point]

    @property
    def total(self) -> float:
        """The estimate of sum |A^T H|, after the last block; not finite where the bounds are not."""
        return self._width * float(self._cells.mean(dim=1).sum())

    @property
    def error(self) -> float:
        """Its standard error."""
        return self._width * math.sqrt(float(self._cells.var(dim=1).sum()) / self._per_cell)

    @property
    def _cells(self) -> torch.Tensor:
        return self._shares.view(-1, self._per_cell)
