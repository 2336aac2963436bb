"""Risk against coverage for every method, HybridGrad in front."""

from __future__ import annotations

from typing import Any

import numpy as np

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.figures.plots import MUTED
from semgrad_guard.evaluation.figures.style import LINES, OURS_COLOUR, dress, new_figure, percent_axis, plain, styled
from semgrad_guard.evaluation.graded import GradedRun
from semgrad_guard.evaluation.metrics import aurc, risk_coverage
from semgrad_guard.evaluation.metrics.tally import Floats

_POINTS = 160
"""Points of a curve: enough for a page, and a page with many curves stays small."""


@styled
def risk_coverage_figure(run: GradedRun) -> Any:
    """Error rate among the answered against the share answered: HybridGrad, the four best others, the rest in grey."""
    figure = new_figure(7.4, 4.4)
    axes = figure.add_subplot()
    named = _named(run)
    for method in (m for m in run.scores if m not in named):
        axes.plot(*_curve(run, method), color=MUTED, linewidth=0.8, alpha=0.6)
    for method, (colour, marker, dash) in zip([m for m in named if m != paper.OURS], LINES, strict=False):
        x, y = _curve(run, method)
        axes.plot(x, y, color=colour, linestyle=dash, marker=marker, markevery=0.12, markersize=5, label=plain(method))
    if paper.OURS in named:
        x, y = _curve(run, paper.OURS)
        axes.plot(x, y, color=OURS_COLOUR, linewidth=3, marker="o", markevery=0.12, label=paper.OURS, zorder=5)
    _baselines(axes, run)
    dress(axes, x="coverage: share of questions answered", y="risk: share of those that are wrong")
    axes.set(xlim=(0, 1.002), ylim=(0, _top(run)))
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    rest = len(run.scores) - len(named)
    if axes.get_legend_handles_labels()[0]:  # none where no answer has a score
        axes.legend(frameon=False, fontsize=9, ncols=2, title=f"grey: {rest} other methods" if rest else None)
    return figure


def _named(run: GradedRun) -> list[str]:
    """HybridGrad and the four best others by AURC; methods without a score are not drawn."""
    areas = {method: aurc(scores, run.correct) for method, scores in run.scores.items()}
    known = sorted((area, method) for method, area in areas.items() if area is not None)
    best = [method for _, method in known if method != paper.OURS][: len(LINES)]
    return [*best, paper.OURS] if areas.get(paper.OURS) is not None else best


def _curve(run: GradedRun, method: str) -> tuple[Floats, Floats]:
    curve = risk_coverage(run.scores[method], run.correct)
    if not len(curve.risk):
        return np.empty(0), np.empty(0)
    kept = np.unique(np.linspace(0, len(curve.risk) - 1, _POINTS).round().astype(int))
    return curve.coverage[kept], curve.risk[kept]


def _baselines(axes: Any, run: GradedRun) -> None:
    base = 1.0 - run.accuracy
    axes.plot([0, 1], [base, base], color=MUTED, linestyle=(0, (5, 3)), linewidth=1.3)
    axes.annotate(
        "random order", (0.99, base), (0, 3), textcoords="offset points", ha="right", fontsize=8.5, color=MUTED
    )
    kept = np.linspace(0.005, 1, _POINTS)
    axes.plot(kept, np.maximum(0.0, 1 - run.accuracy / kept), color=MUTED, linestyle=(0, (1, 1.6)), linewidth=1.6)
    at = min(0.98, run.accuracy + 0.6 * base)
    height = max(0.0, 1 - run.accuracy / at)
    axes.annotate("oracle", (at, height), (4, -2), textcoords="offset points", va="top", fontsize=8.5, color=MUTED)


def _top(run: GradedRun) -> float:
    """The upper end of the risk axis; the first few answers, where one error is a high rate, do not stretch it."""
    settled = [y[len(y) // 10 :].max(initial=0.0) for _, y in (_curve(run, method) for method in run.scores)]
    return min(1.02, max(0.05, 1.3 * max([1.0 - run.accuracy, *map(float, settled)])))
