"""What a reader decides by: how much a promise lets through, and which methods differ from HybridGrad beyond chance."""

from __future__ import annotations

from dataclasses import dataclass

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.graded.summary import RunSummary
from semgrad_guard.evaluation.metrics.guarantee import fewest_questions


@dataclass(frozen=True)
class Promised:
    """What a run's reader decides by: for one alpha, what HybridGrad answers, and what the best method does.

    `needs` is how many questions it takes to promise this at all, where the run has fewer.
    """

    alpha: float
    ours: float | None
    best: str
    best_coverage: float
    needs: int | None


@dataclass(frozen=True)
class Standing:
    """Methods by the interval of their AUROC's difference to HybridGrad's: above zero, below it, or holding it."""

    better: list[str]
    worse: list[str]
    undecided: list[str]


def standing(summary: RunSummary) -> Standing | None:
    """Which methods beat HybridGrad's AUROC on a run, which it beats, and which are too close to tell."""
    found = Standing([], [], [])
    for method, each in summary.methods.items():
        difference = each.difference.get("auroc")
        if method == paper.OURS or difference is None or difference.value is None or difference.low is None:
            continue
        if not difference.excludes_zero:
            found.undecided.append(method)
        else:
            (found.better if difference.value > 0 else found.worse).append(method)
    return found if found.better or found.worse or found.undecided else None


def promises(summary: RunSummary) -> list[Promised]:
    """One entry per alpha; none where there is a single question, which cannot be split."""
    found: list[Promised] = []
    for alpha in summary.alphas:
        coverage = {m: g.mean_coverage for m, s in summary.methods.items() if (g := s.guaranteed[alpha]) is not None}
        if coverage:
            best = max(coverage, key=lambda method: (coverage[method], method == paper.OURS))
            needed = fewest_questions(alpha=alpha)
            needs = needed if summary.run.n < needed else None
            found.append(Promised(alpha, coverage.get(paper.OURS), best, coverage[best], needs))
    return found
