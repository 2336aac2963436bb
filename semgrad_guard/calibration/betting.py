"""Bets that begin at many times, so that a long time without a change costs nothing that was not already bet.

A share of the capital bets from the first observation on, and the rest begins later, some of it with every observation.
These shares add up to one, so the whole is a supermartingale wherever each bet is one. By Ville's inequality it ever
reaches 1 / level with a probability of at most `level`, however often one looks.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 1e100
"""The most that a bet may win: far beyond any alarm, and small enough for further products."""


@dataclass(frozen=True)
class Schedule:
    """When bets begin: `at_once` is the share of the capital that bets from the first observation on. Half of the rest
    has begun by observation `slowness`, so changes at about that time are noticed soonest.
    """

    at_once: float
    slowness: float

    def begins(self, k: int) -> tuple[float, float]:
        """The share whose bets begin with observation k = 1, 2 ..., without `at_once`; and the one that waits after it.

        The shares are at_once + sum of (1 - at_once) b / ((k + b - 1) (k + b)) = 1, with the slowness b.
        """
        waits = (1 - self.at_once) * self.slowness / (k + self.slowness)
        return waits / (k + self.slowness - 1), waits
