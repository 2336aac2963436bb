"""Simulates the monitors of a running guard: how often they are wrong in a whole life, and how soon they notice.

python scripts/check_watching.py [--streams 10000]

It fails where a false alarm is more frequent than promised, or a change is noticed later than this page's limits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration.monitors import Bets, RankBets, UnscoredBets

NEVER = 10**9
Floats = NDArray[np.float64]


def first_alarms(step: Callable[[int], Floats], steps: int, limit: float, streams: int) -> NDArray[np.int64]:
    """The step of each stream's first alarm."""
    first = np.full(streams, NEVER)
    for t in range(1, steps + 1):
        first = np.where((first == NEVER) & (step(t) >= limit), t, first)
    return first


def grades(rate: Callable[[int], float], steps: int, streams: int, *, alpha: float = 0.1) -> NDArray[np.int64]:
    rng, bets = np.random.default_rng(1), Bets(alpha, streams=streams)
    return first_alarms(lambda t: bets.add(rng.random(streams) < rate(t)), steps, 10, streams)


def ranks(shift: Callable[[int], float], steps: int, streams: int, *, size: int = 100) -> NDArray[np.int64]:
    """Real ranks of normal scores among `size` calibration scores and all earlier ones; level .01."""
    rng, bets = np.random.default_rng(2), RankBets(size, streams=streams)
    edges, rows = np.sort(rng.normal(size=(streams, size)), axis=1), np.arange(streams)
    counts = np.ones((streams, size + 1))

    def step(t: int) -> Floats:
        cells = (edges < (rng.normal(size=streams) + shift(t))[:, None]).sum(axis=1)
        own = counts[rows, cells]
        below = np.where(np.arange(size + 1) < cells[:, None], counts, 0).sum(axis=1)
        counts[rows, cells] += 1
        return bets.add((below + rng.random(streams) * own) / (size + t))

    return first_alarms(step, steps, 100, streams)


def uniform_ranks(steps: int, streams: int) -> NDArray[np.int64]:
    rng, bets = np.random.default_rng(3), RankBets(100, streams=streams)
    return first_alarms(lambda _: bets.add(rng.random(streams)), steps, 100, streams)


def unscored(n: int, rate: Callable[[int], float], steps: int, streams: int, *, base: float) -> NDArray[np.int64]:
    rng = np.random.default_rng(4)
    bets = [UnscoredBets(n, int(rng.binomial(n, base)), rng) for _ in range(streams)]
    return first_alarms(
        lambda t: np.array([bet.add(bool(rng.random() < rate(t))) for bet in bets]), steps, 100, streams
    )


def median_after(alarms: NDArray[np.int64], change: int) -> float:
    return float(np.median(alarms[alarms > change])) - change


def main() -> int:
    """1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    streams: int = parser.parse_args().streams
    some = max(100, streams // 25)
    rows = [
        *(
            (f"promise of {alpha} kept: called broken in 2,000 grades", 0.1, np.mean(alarms < NEVER))
            for alpha in (0.05, 0.1, 0.2)
            for alarms in [grades(lambda _, alpha=alpha: alpha, 2000, streams, alpha=alpha)]
        ),
        ("error .1 -> .2 from the start: median grades", 70, median_after(grades(lambda _: 0.2, 1000, some), 0)),
        (
            "error .05 -> .2 after 500 good ones: median grades",
            170,
            median_after(grades(lambda t: 0.05 if t <= 500 else 0.2, 1500, some), 500),
        ),
        (
            "error .1 -> .2 after 500 at .1: median grades",
            170,
            median_after(grades(lambda t: 0.1 if t <= 500 else 0.2, 1500, some), 500),
        ),
        ("scores as before: alarms in 10,000", 0.01, np.mean(uniform_ranks(10_000, streams) < NEVER)),
        (
            "scores as before, real ranks among 100: alarms in 3,000",
            0.01,
            np.mean(ranks(lambda _: 0, 3000, some) < NEVER),
        ),
        ("one sigma from the start: median scores", 20, median_after(ranks(lambda _: 1, 300, some), 0)),
        (
            "one sigma after 10,000 clean: median scores",
            40,
            median_after(ranks(lambda t: float(t > 10_000), 10_300, some), 10_000),
        ),
        (
            "a quarter sigma after 10,000 clean: median scores",
            520,
            median_after(ranks(lambda t: 0.25 * (t > 10_000), 12_500, some), 10_000),
        ),
        (
            "5 % unscored as before: alarms in 3,000",
            0.01,
            np.mean(unscored(100, lambda _: 0.05, 3000, some, base=0.05) < NEVER),
        ),
        (
            "5 % -> 25 % unscored after 1,000: median answers",
            60,
            median_after(unscored(100, lambda t: 0.05 if t <= 1000 else 0.25, 1500, some, base=0.05), 1000),
        ),
    ]
    for title, limit, found in rows:
        print(f"{'ok  ' if found <= limit else 'FAIL'} {title}: {found:.4g} (at most {limit:g})")
    return int(any(found > limit for _, limit, found in rows))


if __name__ == "__main__":
    sys.exit(main())
