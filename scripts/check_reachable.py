"""Simulates what may be promised where no threshold keeps the promise: rules that are offered, and rules that are not.

python scripts/check_reachable.py [--repetitions 10000] [--page docs/results/reachable.md]

A rule delivers up to a threshold and promises an error rate. It breaks its promise where the true risk is larger. Of
each rule the largest share of broken promises over 21 populations and 4 sizes is shown (delta = .1). A rule that is
offered may reach .106 in populations of its assumption, and .12 elsewhere; one that is refused has to exceed delta
somewhere, or its refusal has no reason. With `--page` the table is written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import product

import numpy as np
from check_guarantee import DELTA, DESIGNS, HOSTILE, JUST_ABOVE, Design, Floats, Normal, Steps
from numpy.typing import NDArray
from simulations import WITHIN, arguments, finished, simulated_all, table, when_and_where

from semgrad_guard.calibration import gates, rows_to_grade
from semgrad_guard.calibration.thresholds import Reachable

SIZES = (50, 100, 200, 300)
ALPHAS = (0.05, 0.1, 0.2, 0.3, 0.4)
SHARES = (0.2, 0.3, 0.5, 0.7)
WITHHELD = 0.3
POPULATIONS = (
    *DESIGNS,
    JUST_ABOVE,
    Design("57 % wrong, AUROC 0.77, alpha 0.3", Normal(0.57, 0.77), 0.3),
    Design("57 % wrong, AUROC 0.77, alpha 0.1", Normal(0.57, 0.77), 0.1),
    Design("57 % wrong, AUROC 0.65", Normal(0.57, 0.65), 0.2),
    Design("80 % wrong, AUROC 0.90", Normal(0.8, 0.9), 0.1),
    Design("57 % wrong, scores that tell nothing", Normal(0.57, 0.5), 0.2),
    Design("a step at a third", Steps((0.0, 0.33), (0.15, 0.8)), 0.1),
    Design("flat at 20 %, then wrong", Steps((0.0, 0.5), (0.2, 0.7)), 0.15),
    Design("12.5 % wrong, then slowly more", Steps((0.0, 0.32, 0.5), (0.125, 0.205, 0.425)), 0.05),
    Design("worse first", Steps((0.0, 0.28, 0.34, 0.6), (0.1, 0.6, 0.15, 0.7)), 0.1, hostile=True),
)

Bools = NDArray[np.bool_]
Outcome = tuple[float, float] | None
"""A threshold and the error rate that is promised; None: nothing is delivered."""


def _or_reachable(walk: gates.Walk, *, alpha: float) -> Outcome:
    if walk.threshold is not None:
        return walk.threshold, alpha
    found = Reachable.of(walk, alpha=alpha)
    return None if found is None else (found.threshold, found.alpha)


def reachable(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
    return _or_reachable(gates.walk(scores, wrong, alpha=alpha, delta=DELTA), alpha=alpha)


def reachable_by_hand(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
    """Half of the surest answers are graded."""
    rows = rows_to_grade(scores, alpha=alpha, by_hand=len(scores) // 3)
    own, labels = scores[rows], wrong[rows]
    return _or_reachable(gates.walk(own, labels, alpha=alpha, delta=DELTA, known=scores), alpha=alpha)


def some_withheld(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
    """A fifth of the answers abstain and a tenth are cut off: neither is walked over, nor delivered."""
    kept = np.random.default_rng(np.abs(scores).view(np.uint64)).random(len(scores)) >= WITHHELD
    return reachable(scores[kept], wrong[kept], alpha)


def first_of_alphas(delta: float) -> Rule:
    """The smallest of several alphas that has a threshold."""

    def rule(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
        for tried in ALPHAS:
            if (found := gates.walk(scores, wrong, alpha=tried, delta=delta).threshold) is not None:
                return found, tried
        return None

    return rule


def smallest_of_first_gate(delta: float) -> Rule:
    """The walk at the smallest alpha that its first gate allows."""

    def rule(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
        count = math.ceil(gates.START * len(scores))
        tried = gates.upper_bound(int(wrong[np.argsort(scores)][:count].sum()), count, delta=delta)
        found = gates.walk(scores, wrong, alpha=min(0.999, tried), delta=delta).threshold
        return None if found is None else (found, tried)

    return rule


def menu_of_shares(delta: float) -> Rule:
    """The share of the answers, among several, with the smallest bound."""

    def rule(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
        order = np.argsort(scores)
        counts = [math.ceil(share * len(scores)) for share in SHARES]
        bounds = [gates.upper_bound(int(wrong[order][:count].sum()), count, delta=delta) for count in counts]
        best = int(np.argmin(bounds))
        return float(scores[order][counts[best] - 1]), bounds[best]

    return rule


def plain_threshold(scores: Floats, wrong: Bools, alpha: float) -> Outcome:
    """The largest with at most a share alpha of errors among the labels, and at least five answers."""
    order = np.argsort(scores)
    shares = np.cumsum(wrong[order]) / np.arange(1, len(scores) + 1)
    kept = np.flatnonzero(shares[4:] <= alpha)
    return (float(scores[order][kept[-1] + 4]), alpha) if len(kept) else None


Rule = Callable[[Floats, Bools, float], Outcome]
OFFERED: Mapping[str, Rule] = {
    "the walk, else the reachable promise": reachable,
    "the same with grades by hand": reachable_by_hand,
    f"the same where {WITHHELD:.0%} abstain or are cut off": some_withheld,
    f"{len(ALPHAS)} alphas in turn, each a try at delta / {len(ALPHAS)}": first_of_alphas(DELTA / len(ALPHAS)),
}
REFUSED: Mapping[str, Rule] = {
    f"{len(ALPHAS)} alphas in turn, each at delta": first_of_alphas(DELTA),
    "the smallest alpha that the first gate allows, at delta": smallest_of_first_gate(DELTA),
    f"the best of {len(SHARES)} shares, each at delta": menu_of_shares(DELTA),
    "a plain threshold by the errors among the labels": plain_threshold,
}
RULES = {**OFFERED, **REFUSED}


def simulated(
    design: Design, n: int, repetitions: int, rules: Iterable[str] = tuple(RULES)
) -> dict[str, tuple[float, float]]:
    """By rule: the share of broken promises, and the mean share of answers that is delivered."""
    rng, population = np.random.default_rng(1), design.population
    sums = {name: np.zeros(2) for name in rules}
    for _ in range(repetitions):
        scores, wrong = population.draw(rng, n)
        for name in sums:
            found = RULES[name](scores, wrong, design.alpha)
            if found is not None and (name in REFUSED or found[1] == design.alpha or found[1] < wrong.mean()):
                sums[name] += population.risk(found[0]) > found[1], population.share(found[0])
    return {name: (float(total[0]) / repetitions, float(total[1]) / repetitions) for name, total in sums.items()}


Cells = Mapping[tuple[Design, int], Mapping[str, tuple[float, float]]]


def worst(cells: Cells, name: str, *, hostile: bool) -> float:
    """The largest share of broken promises."""
    return max(cell[name][0] for (design, _), cell in cells.items() if design.hostile is hostile)


def main() -> int:
    given = arguments(__doc__)
    work = list(product(POPULATIONS, SIZES))
    found = simulated_all(simulated, work, given.repetitions, workers=given.workers)
    cells: Cells = dict(zip(work, found, strict=True))
    weak = next(design for design in POPULATIONS if design.title.startswith("57 % wrong, AUROC 0.77, alpha 0.3"))
    kinds = {"offered": OFFERED, "refused": REFUSED}
    most = {name: [worst(cells, name, hostile=hostile) for hostile in (False, True)] for name in RULES}
    lines = [
        "# No threshold: what can be promised, simulated",
        "",
        f"`python scripts/check_reachable.py --repetitions {given.repetitions}`, {when_and_where()}: "
        f"{len(POPULATIONS)} populations, {', '.join(map(str, SIZES))} labels, delta = {DELTA:g}. The largest share of "
        "calibrations whose delivered answers are wrong more often than promised. A rule that is offered keeps it at "
        "most delta in populations of its assumption; *hostile* ones break that. The last column is the mean share "
        f"delivered with 100 labels of a model that is wrong in 57 % (AUROC 0.77, alpha {weak.alpha:g}).",
        "",
        *table(
            ("rule", "", "broken, at most", "hostile populations", "delivered"),
            (
                (name, kind, *(f"{share:.3f}" for share in (*most[name], cells[weak, 100][name][1])))
                for kind, names in kinds.items()
                for name in names
            ),
        ),
    ]
    kept = all(most[name][0] <= WITHIN and most[name][1] <= HOSTILE for name in OFFERED)
    return finished(given.page, lines, kept=kept and all(most[name][0] > DELTA for name in REFUSED))


if __name__ == "__main__":
    sys.exit(main())
