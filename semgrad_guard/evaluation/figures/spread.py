"""Reliability diagrams, and how each method's scores are spread over right and wrong answers: small panels alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.figures.plots import MUTED
from semgrad_guard.evaluation.figures.style import RIGHT, WRONG, dress, new_figure, percent_axis, styled
from semgrad_guard.evaluation.graded import GradedRun
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.metrics.confidence_quality import reliability
from semgrad_guard.evaluation.metrics.tally import Floats

_COLUMNS = 4
_TITLE = 18
_WIDE = 30.0
"""Positive scores that span more than this ratio are drawn on a log axis."""


@styled
def reliability_figure(run: GradedRun, confidence: Mapping[str, Floats]) -> Any:
    """Share of right answers against P(correct), with exact 95 % intervals: HybridGrad and the three best others.

    Areas grow with the number of answers.

    `confidence` is each method's cross-fitted P(correct), [answers], nan where there is no score.
    """
    methods = [m for m in _best(run, 4) if np.isfinite(confidence[m]).any()]
    figure, panels = _panels(len(methods), height=2.3)
    for axes, method in zip(panels, methods, strict=True):
        found = reliability(confidence[method], run.correct)
        dress(axes, title=method, width=_TITLE)
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
        spread = np.abs(np.stack([found.accuracy - found.low, found.high - found.accuracy]))
        axes.errorbar(found.confidence, found.accuracy, yerr=spread, color=RIGHT, fmt="none", elinewidth=1.2)
        sizes = 6 + 160 * found.count / found.count.sum()
        axes.scatter(found.confidence, found.accuracy, s=sizes, color=RIGHT, zorder=3, clip_on=False)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        percent_axis(axes.xaxis)
        percent_axis(axes.yaxis)
    figure.supxlabel("P(correct) as said", fontsize=10)
    figure.supylabel("share that is right", fontsize=10)
    return figure


@styled
def histogram_figure(run: GradedRun) -> Any:
    """Every method's scores: right answers filled, wrong ones outlined; log axes where scores span powers of ten."""
    methods = paper.in_order(run.scores)
    figure, panels = _panels(len(methods), height=1.55)
    correct = np.array(run.correct)
    for axes, method in zip(panels, methods, strict=True):
        scores = np.array([np.nan if s is None else s for s in run.scores[method]], dtype=np.float64)
        dress(axes, title=method, grid=False, width=_TITLE)
        axes.set_yticks([])
        axes.tick_params(labelsize=8)
        _histogram(axes, scores[correct & np.isfinite(scores)], scores[~correct & np.isfinite(scores)])
    if panels:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _histogram(axes: Any, right: Floats, wrong: Floats) -> None:
    both = np.concatenate([right, wrong])
    if not len(both):
        axes.text(0.5, 0.5, "no scores", ha="center", transform=axes.transAxes)
        return
    low, high = float(both.min()), float(both.max())
    log = low > 0 and high / low > _WIDE
    if log:
        axes.set_xscale("log")
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.geomspace(low, high, 25) if log else np.linspace(low, high, 25)
    axes.hist(right, bins=edges, color=RIGHT, alpha=0.45, label="right answers")
    axes.hist(wrong, bins=edges, histtype="step", color=WRONG, linewidth=1.6, label="wrong answers")
    if log and math.log10(high / low) < 1.5:
        axes.xaxis.set_minor_formatter("")


def _best(run: GradedRun, count: int) -> list[str]:
    """HybridGrad first, then the best others by AUROC."""
    found = {method: auroc(scores, run.correct) or 0.0 for method, scores in run.scores.items()}
    others = sorted((m for m in found if m != paper.OURS), key=lambda m: -found[m])
    return ([paper.OURS] if paper.OURS in found else []) + others[: count - (paper.OURS in found)]


def _panels(count: int, *, height: float) -> tuple[Any, Sequence[Any]]:
    """A figure with `count` panels in rows of four; the rest of the last row stays empty."""
    rows = max(1, math.ceil(count / _COLUMNS))
    figure = new_figure(7.4, height * rows + 0.5)
    grid = figure.subplots(rows, min(_COLUMNS, max(1, count)), squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, list(grid[:count])
