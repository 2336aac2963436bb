"""Simulates promises from few labels: grades by hand of a random part of the surest answers.

python scripts/check_labels.py [--repetitions 10000] [--page docs/results/labels.md]

1,000 answers a set, alpha = delta = .1. It fails where the truth is violated in more than .106 of the sets, or where
less is delivered than the documentation says. With `--page` it writes the tables.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from check_guarantee import Design, Normal, Steps
from simulations import WITHIN, arguments, when_and_where

from semgrad_guard.calibration import gates, hand_grades

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


@dataclass(frozen=True)
class Cell:
    """Means over the repetitions: the share delivered, of sets with a threshold, and of those with a bad one."""

    design: Design
    by_hand: int
    coverage: float
    found: float
    violated: float

    @property
    def holds(self) -> bool:
        floor = FLOORS[self.by_hand] if self.design == DESIGNS[0] else 0.0
        return self.violated <= WITHIN and self.coverage >= floor

    def __str__(self) -> str:
        return f"{self.coverage:.3f} in {self.found:.2f} ({self.violated:.3f})"


def simulated(index: int, by_hand: int, repetitions: int) -> Cell:
    """The outcome of one design."""
    design, rng = DESIGNS[index], np.random.default_rng([index, by_hand])
    surest, found = round(hand_grades.share_to_grade(design.alpha) * N), list[float]()
    for _ in range(repetitions):
        scores, wrong = design.population.draw(rng, N)
        drawn = rng.permutation(np.argsort(scores)[:surest])[:by_hand]
        threshold = gates.walk(scores[drawn], wrong[drawn], alpha=design.alpha, delta=DELTA).threshold
        found += [] if threshold is None else [threshold]
    coverage = sum(design.population.share(threshold) for threshold in found) / repetitions
    violated = sum(design.population.risk(threshold) > design.alpha for threshold in found) / repetitions
    return Cell(design, by_hand, coverage, len(found) / repetitions, violated)


def page(cells: list[Cell], *, repetitions: int) -> str:
    lines = [
        "# Few labels, simulated",
        "",
        f"`python scripts/check_labels.py --repetitions {repetitions}`, {when_and_where()}: {N:,} answers a set, "
        f"delta = {DELTA:g}. A cell gives the mean share of answers that is delivered, how often a threshold is "
        "found, and in brackets how often the true error rate among the delivered answers exceeds alpha. The last is "
        "to be at most delta. The grades are of a random part of the surest answers.",
        "",
        f"| population | alpha | {' | '.join(f'{size} by hand' for size in SIZES)} |",
        "| --- " * (len(SIZES) + 2) + "|",
    ]
    for design in DESIGNS:
        row = (str(cell) for cell in cells if cell.design == design)
        lines.append(f"| {design.title} | {design.alpha:g} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    given = arguments(__doc__)
    cases = [(i, size) for i in range(len(DESIGNS)) for size in SIZES]
    cells: list[Cell] = []
    with ProcessPoolExecutor(given.workers) as pool:
        for cell in pool.map(simulated, *zip(*cases, strict=True), [given.repetitions] * len(cases)):
            cells.append(cell)
            short = "" if cell.holds else "  <- does not hold"
            print(f"{len(cells)}/{len(cases)} {cell.design.title}, {cell.by_hand}: {cell}{short}", flush=True)
    if given.page is not None:
        given.page.write_text(page(cells, repetitions=given.repetitions), encoding="utf-8")
    return 0 if all(cell.holds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
