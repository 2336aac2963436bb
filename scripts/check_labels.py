"""Simulates promises from few labels: grades by hand of a random part of the surest answers.

python scripts/check_labels.py [--repetitions 10000] [--page docs/results/labels.md]

1,000 answers a set, alpha = delta = .1. It fails where the truth is violated in more than .106 of the sets, or where
less is delivered than the documentation says. With `--page` it writes the tables.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
from check_guarantee import Cell, Design, Normal, Steps
from simulations import arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration import gates, planning

DELTA, N = 0.1, 1000
SIZES = (50, 100, 200)

DESIGNS = (
    Design("20 % wrong, AUROC 0.80", Normal(0.2, 0.8), 0.1),
    Design("25 % wrong, AUROC 0.75", Normal(0.25, 0.75), 0.1),
    Design("30 % wrong, AUROC 0.75", Normal(0.3, 0.75), 0.2),
    Design("everywhere just above alpha", Steps((0.0,), (0.1001,)), 0.1),
)


FLOORS = {50: 0.15, 100: 0.25, 200: 0.41}
"""Coverage in the first design, at least: by number of grades by hand."""


def simulated(design: Design, by_hand: int, repetitions: int) -> Cell:
    rng = np.random.default_rng([DESIGNS.index(design), by_hand])
    surest, found = round(planning.share_to_grade(design.alpha) * N), list[float]()
    for _ in range(repetitions):
        scores, wrong = design.population.draw(rng, N)
        drawn = rng.permutation(np.argsort(scores)[:surest])[:by_hand]
        threshold = gates.walk(scores[drawn], wrong[drawn], alpha=design.alpha, delta=DELTA).threshold
        found += [] if threshold is None else [threshold]
    coverage = sum(design.population.share(threshold) for threshold in found) / repetitions
    violated = sum(design.population.risk(threshold) > design.alpha for threshold in found) / repetitions
    return Cell(design, by_hand, len(found) / repetitions, coverage, violated)


def main() -> int:
    given = arguments(__doc__)
    cells = simulated_all(simulated, product(DESIGNS, SIZES), given.repetitions, workers=given.workers)
    lines = [
        "# Few labels, simulated",
        "",
        f"`python scripts/check_labels.py --repetitions {given.repetitions}`, {when_and_where()}: {N:,} answers a set, "
        f"delta = {DELTA:g}. A cell gives the mean share of answers that is delivered, how often a threshold is "
        "found, and in brackets how often the true error rate among the delivered answers exceeds alpha. The last is "
        "to be at most delta. The grades are of a random part of the surest answers.",
        "",
        *table(
            ("population", "alpha", *(f"{size} by hand" for size in SIZES)),
            ((d.title, f"{d.alpha:g}", *(cell.figures for cell in cells if cell.design == d)) for d in DESIGNS),
        ),
    ]
    enough = all(cell.coverage >= FLOORS[cell.n] for cell in cells if cell.design == DESIGNS[0])
    return finished(given.page, lines, kept=enough and all(cell.holds for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
