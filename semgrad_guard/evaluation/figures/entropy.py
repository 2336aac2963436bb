"""HybridGrad's balance: how the mean token entropy is spread, and AUROC over tau and beta (Figure 5 of the paper)."""

from __future__ import annotations

from typing import Any

import numpy as np

from semgrad_guard.evaluation.figures.plots import INK, MUTED
from semgrad_guard.evaluation.figures.style import LINES, OURS_COLOUR, RIGHT, dress, new_figure, percent_axis, styled
from semgrad_guard.evaluation.graded import GradedRun
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.metrics.tally import Floats

TAUS = np.geomspace(0.01, 100.0, 25)
BETAS = (0.1, 0.5, 1.0, 2.0, 10.0)


def hybrid(semgrad: Floats, paragrad: Floats, mean_entropy: Floats, *, tau: float, beta: float) -> Floats:
    """HybridGrad from its parts: (1 - a) SemGrad + beta a ParaGrad, a = exp(-mean entropy / tau); nan where one is."""
    a = np.exp(-mean_entropy / tau)
    return (1.0 - a) * semgrad + beta * a * paragrad


@styled
def entropy_figure(run: GradedRun) -> Any:
    """Histograms of mean token entropy (all answers, right ones), beside AUROC over tau for several beta.

    Either half says so where the run lacks what it needs.
    """
    figure = new_figure(7.4, 3.4)
    left, right = figure.subplots(1, 2)
    _histogram(left, run)
    _curves(right, run)
    return figure


def has_entropy(run: GradedRun) -> bool:
    """Whether there is anything to draw."""
    return any(value is not None for value in run.mean_entropy)


def _histogram(axes: Any, run: GradedRun) -> None:
    dress(axes, title="Mean token entropy", x="nats", y="answers")
    entropy, correct = _column(run.mean_entropy), np.array(run.correct)
    known = np.isfinite(entropy)
    if not known.any():
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
        return
    edges = np.linspace(0.0, float(entropy[known].max()) or 1.0, 31)
    axes.margins(y=0.12)
    axes.hist(entropy[known], bins=edges, color=RIGHT, alpha=0.3, label="all answers")
    axes.hist(entropy[known & correct], bins=edges, color=RIGHT, alpha=0.9, label="right answers")
    if (known & correct).any():
        levels = np.percentile(entropy[known & correct], [50, 75])
        for label, level, align, shift in zip(("50%", "75%"), levels, ("right", "left"), (-2, 2), strict=True):
            axes.axvline(level, color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
            where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": align, "va": "top"}
            axes.annotate(label, (level, 1.0), (shift, -1), fontsize=8, **where)
    axes.legend(
        frameon=False, fontsize=8.5, loc="center right", title="lines: percentiles of\nright answers", title_fontsize=8
    )


def _curves(axes: Any, run: GradedRun) -> None:
    dress(axes, title="AUROC of HybridGrad", x="tau (small: SemGrad, large: ParaGrad)")
    parts = [run.scores.get("SemGrad"), run.scores.get("ParaGrad"), run.mean_entropy or None]
    if any(part is None for part in parts):
        axes.text(0.5, 0.5, "needs SemGrad, ParaGrad\nand the mean entropy", ha="center", transform=axes.transAxes)
        return
    semgrad, paragrad, entropy = (_column(part or ()) for part in parts)
    if auroc(hybrid(semgrad, paragrad, entropy, tau=1.0, beta=1.0).tolist(), run.correct) is None:
        axes.text(0.5, 0.5, "not defined: all answers are\nright, or all wrong", ha="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    looks = [*LINES[:2], (OURS_COLOUR, "o", "-"), *LINES[2:]]
    for beta, (colour, marker, dash) in zip(BETAS, looks, strict=True):
        found = [auroc(hybrid(semgrad, paragrad, entropy, tau=tau, beta=beta).tolist(), run.correct) for tau in TAUS]
        thick = 2.6 if beta == 1.0 else 1.3
        axes.plot(
            TAUS,
            found,
            color=colour,
            marker=marker,
            linestyle=dash,
            linewidth=thick,
            markersize=4,
            markevery=4,
            label=f"beta {beta:g}",
        )
    for name, scores, side, align in (("SemGrad", semgrad, 0.0, "left"), ("ParaGrad", paragrad, 1.0, "right")):
        level = auroc(scores.tolist(), run.correct)
        axes.axhline(level, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.1)
        where = {"xytext": (0, 2), "xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": align}
        axes.annotate(name, (side, level), fontsize=8, color=MUTED, **where)
    percent_axis(axes.yaxis, digits=None)
    axes.legend(frameon=False, fontsize=8)


def _column(values: Any) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
