"""Simulates promises from few labels: grades by hand, a machine's grades next to them, and kinds of questions.

python scripts/check_labels.py [--repetitions 10000] [--page docs/results/labels.md]

1,000 answers a set, alpha = delta = .1. It fails where the truth is violated in more than .106 of the sets, or where
less is delivered than the documentation says. With `--page` it writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from check_guarantee import Design, Floats, Normal, Steps
from numpy.typing import NDArray
from simulations import WITHIN, arguments, when_and_where

from semgrad_guard.calibration import gates, hand_grades

DELTA, N, AT_ONCE = 0.1, 1000, 250
SIZES = (50, 100, 200)
Flags = NDArray[np.bool_]

DESIGNS = (
    Design("20 % wrong, AUROC 0.80", Normal(0.2, 0.8), 0.1),
    Design("25 % wrong, AUROC 0.75", Normal(0.25, 0.75), 0.1),
    Design("30 % wrong, AUROC 0.75", Normal(0.3, 0.75), 0.2),
    Design("everywhere just above alpha", Steps((0.0,), (0.1001,)), 0.1),
)


@dataclass(frozen=True)
class Grader:
    """A machine that grades wrong answers right (`soft`) and right ones wrong (`harsh`), in such shares.

    `tilted`: it is twice as soft on the surest answers and not at all on the least sure.
    """

    title: str
    soft: float = 0.0
    harsh: float = 0.0
    tilted: bool = False

    def wrong(self, rng: np.random.Generator, truth: Flags, ranks: Floats) -> Flags:
        """Its grades of answers, wrong or not, at these ranks from 0 (surest) to 1."""
        soft = self.soft * (2 * (1 - ranks) if self.tilted else np.ones_like(ranks))
        luck = rng.random(truth.shape)
        return np.where(truth, luck >= soft, luck < self.harsh)


GRADERS = (
    Grader("10 % soft", 0.1),
    Grader("20 % soft", 0.2),
    Grader("20 % soft, more on surer answers", 0.2, tilted=True),
    Grader("10 % soft on surer answers, 2 % harsh", 0.1, 0.02, tilted=True),
    Grader("5 % soft, 5 % harsh", 0.05, 0.05),
    Grader("20 % harsh", 0.0, 0.2),
    Grader("20 % soft on surer answers, 20 % harsh", 0.2, 0.2, tilted=True),
)

FLOORS = {(None, 50): 0.15, (None, 100): 0.25, (None, 200): 0.41, ("10 % soft", 100): 0.29, ("10 % soft", 200): 0.46}
"""Coverage in the first design, at least: by grader (None: by hand alone) and number of grades by hand."""


@dataclass(frozen=True)
class Cell:
    """Means over the repetitions: the share delivered, of sets with a threshold, and of those with a bad one."""

    design: Design
    grader: Grader | None
    by_hand: int
    coverage: float
    found: float
    violated: float

    @property
    def holds(self) -> bool:
        title = None if self.grader is None else self.grader.title
        floor = FLOORS.get((title, self.by_hand), 0.0) if self.design == DESIGNS[0] else 0.0
        return self.violated <= WITHIN and self.coverage >= floor

    def __str__(self) -> str:
        return f"{self.coverage:.3f} in {self.found:.2f} ({self.violated:.3f})"


def simulated(index: int, grader: Grader | None, by_hand: int, repetitions: int) -> Cell:
    """The outcome of one design. Repetitions are walked together, answers in order of their scores."""
    design, rng, thresholds = DESIGNS[index], np.random.default_rng([index, by_hand]), list[float]()
    surest = round(hand_grades.share_to_grade(design.alpha) * N)
    while len(thresholds) < repetitions:
        sets = [design.population.draw(rng, N) for _ in range(min(AT_ONCE, repetitions - len(thresholds)))]
        order = [np.argsort(scores)[:surest] for scores, _ in sets]
        scores = np.array([one[places] for (one, _), places in zip(sets, order, strict=True)])
        wrong = np.array([one[places] for (_, one), places in zip(sets, order, strict=True)])
        hand = rng.random(wrong.shape).argsort(axis=1) < by_hand
        if grader is None:
            for one, truth, drawn in zip(scores, wrong, hand, strict=True):
                found = gates.walk(one[drawn], truth[drawn], alpha=design.alpha, delta=DELTA).threshold
                thresholds.append(-np.inf if found is None else found)
        else:
            machine = grader.wrong(rng, wrong, np.broadcast_to(np.arange(surest) / N, wrong.shape))
            thresholds.extend(_bet(rng, scores, (machine, wrong, hand), alpha=design.alpha))
    found = [threshold for threshold in thresholds if threshold > -np.inf]
    coverage = sum(design.population.share(threshold) for threshold in found) / repetitions
    violated = sum(design.population.risk(threshold) > design.alpha for threshold in found) / repetitions
    return Cell(design, grader, by_hand, coverage, len(found) / repetitions, violated)


def _bet(
    rng: np.random.Generator, scores: Floats, grades: tuple[Flags, Flags, Flags], *, alpha: float
) -> Iterator[float]:
    """The threshold of each set (row), or minus infinity; a test for each set and gate."""
    counts = hand_grades.gate_counts(scores.shape[1], by_hand=int(grades[-1][0].sum()))
    order = rng.random(scores.shape).argsort(axis=1)
    machine, wrong, hand = (np.take_along_axis(column, order, axis=1) for column in grades)
    passes = np.array(
        [
            hand_grades.bets(machine, wrong, hand, order < count, alpha=alpha, enough=1 / DELTA) >= 1 / DELTA
            for count in counts.tolist()
        ]
    )
    for one, row in zip(scores, np.logical_and.accumulate(passes, axis=0).sum(axis=0).tolist(), strict=True):
        yield one[counts[row - 1] - 1] if row else -np.inf


def kinds(index: int, repetitions: int) -> tuple[float, float, float]:
    """Two kinds of 300 labels each, and 600 pooled: the shares delivered, and the larger share of bad thresholds."""
    design, rng = DESIGNS[index], np.random.default_rng(5)
    population, alpha, delivered, bad = design.population, design.alpha, np.zeros(3), np.zeros(3)
    for _ in range(repetitions):
        scores, wrong = population.draw(rng, 600)
        for at, rows in enumerate((slice(0, 300), slice(300, 600), slice(None))):
            threshold = gates.walk(scores[rows], wrong[rows], alpha=alpha, delta=DELTA).threshold
            if threshold is not None:
                delivered[at] += population.share(threshold)
                bad[at] += population.risk(threshold) > alpha
    first, second, pooled = (delivered / repetitions).tolist()
    return (first + second) / 2, pooled, float(bad.max()) / repetitions


def _rows(cells: list[Cell], columns: dict[str, tuple[Design, int]]) -> Iterator[str]:
    yield f"| grades next to those by hand | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 1) + "|"
    found = {(cell.grader, cell.design, cell.by_hand): str(cell) for cell in cells}
    for grader in (None, *GRADERS):
        row = (found[grader, *column] for column in columns.values())
        yield f"| {'none' if grader is None else grader.title} | {' | '.join(row)} |"


def page(cells: list[Cell], of_kinds: list[tuple[float, float, float]], *, repetitions: int) -> str:
    lines = [
        "# Few labels, simulated",
        "",
        f"`python scripts/check_labels.py --repetitions {repetitions}`, {when_and_where()}: {N:,} answers a set, "
        f"delta = {DELTA:g}. A cell gives the mean share of answers that is delivered, how often a threshold is "
        "found, and in brackets how often the true error rate among the delivered answers exceeds alpha. The last is "
        "to be at most delta, whatever the machine's mistakes.",
        "",
        "The grades by hand are of a random part of the surest answers. A *soft* grader calls wrong answers right, a "
        "*harsh* one right answers wrong. *On surer answers*: twice as soft on the surest, not on the least sure.",
    ]
    first, *others = DESIGNS
    sizes = {f"{size} by hand": (first, size) for size in SIZES}
    designs = {f"{one.title}, alpha {one.alpha:g}": (one, SIZES[1]) for one in others}
    lines += ["", f"## {first.title}, alpha {first.alpha:g}", "", *_rows(cells, sizes)]
    lines += ["", f"## Others, {SIZES[1]} by hand", "", *_rows(cells, designs)]
    lines += [
        "",
        "## Kinds of questions",
        "",
        "| population | two kinds of 300 labels each | 600 labels pooled | violated, at most |",
        "| --- | --- | --- | --- |",
    ]
    for design, (own, pooled, bad) in zip(DESIGNS, of_kinds, strict=True):
        lines.append(f"| {design.title} | {own:.3f} | {pooled:.3f} | {bad:.3f} |")
    return "\n".join([*lines, ""])


def main() -> int:
    given = arguments(__doc__)
    cases = [(i, grader, size) for i in range(len(DESIGNS)) for grader in (None, *GRADERS) for size in SIZES]
    cells: list[Cell] = []
    with ProcessPoolExecutor(given.workers) as pool:
        for cell in pool.map(simulated, *zip(*cases, strict=True), [given.repetitions] * len(cases)):
            cells.append(cell)
            name = "by hand alone" if cell.grader is None else cell.grader.title
            short = "" if cell.holds else "  <- does not hold"
            print(f"{len(cells)}/{len(cases)} {cell.design.title}, {name}, {cell.by_hand}: {cell}{short}", flush=True)
        of_kinds = list(pool.map(kinds, range(len(DESIGNS)), [given.repetitions] * len(DESIGNS)))
    for design, (own, pooled, bad) in zip(DESIGNS, of_kinds, strict=True):
        print(f"{design.title}: kinds {own:.3f}, pooled {pooled:.3f}, violated {bad:.3f}", flush=True)
    if given.page is not None:
        given.page.write_text(page(cells, of_kinds, repetitions=given.repetitions), encoding="utf-8")
    kept = all(own >= 0.7 * pooled or pooled < 0.3 for own, pooled, _ in of_kinds)
    return 0 if kept and all(cell.holds for cell in cells) and all(bad <= WITHIN for *_, bad in of_kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
