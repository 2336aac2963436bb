"""Semantic Preservation Score: the paper's heat map (Figures 2 and 4) and SPS against AUROC (Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.figures.plots import INK
from semgrad_guard.evaluation.figures.style import LINES, OURS_COLOUR, dress, new_figure, plain, save, styled


@dataclass(frozen=True)
class ProbeMaps:
    """What a probe of a model leaves for the report.

    `sps` and `auroc` are [layers, tokens]: row l is decoder layer l, the last column the prompt's last token. `auroc`
    is SemGrad's with that hidden state alone, in [0, 1], None where no answers were graded. `tokens` are the columns'
    labels; `recommendation` says in words which token to use and why.
    """

    title: str
    sps: ArrayLike
    auroc: ArrayLike | None = None
    tokens: Sequence[str] | None = None
    recommendation: str = ""


def draw_sps(path: str | Path, sps: ArrayLike, *, title: str, tokens: Sequence[str] | None = None) -> Path:
    """Draw the heat map of SPS over decoder layers and prompt tokens, as in the paper's Figure 2.

    Args:
        path: where to; the suffix decides the format (.png, .svg, .pdf).
        sps: [layers, tokens], the last column being the prompt's last token.
        title: above the picture.
        tokens: labels of the columns; "-3, -2, -1" without them.
    """
    return save(sps_figure(sps, title=title, tokens=tokens), path)


def draw_sps_against_auroc(path: str | Path, sps: ArrayLike, auroc: ArrayLike, *, title: str) -> Path:
    """Draw SemGrad's AUROC against SPS, one point per hidden state, as in the paper's Figure 3 (nan is left out)."""
    return save(sps_auroc_figure(sps, auroc, title=title), path)


@styled
def sps_figure(sps: ArrayLike, *, title: str, tokens: Sequence[str] | None = None) -> Any:
    """The heat map; a ring marks the highest score."""
    values = _table(sps)
    layers, width = values.shape
    figure = new_figure(max(4.2, 0.48 * width + 1.8), max(3.6, 0.13 * layers + 1.8))
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(values, cmap="viridis", edgecolors="face", linewidth=0.2)
    row, column = np.unravel_index(int(np.nanargmax(values)), values.shape)
    axes.plot(column + 0.5, row + 0.5, marker="o", markersize=9, fillstyle="none", color="#d55e00", markeredgewidth=2)
    dress(axes, title=title, x="prompt token, from the end", y="decoder layer", grid=False)
    labels = [str(t - width) for t in range(width)] if tokens is None else [plain(t, width=24) for t in tokens]
    turned = max(len(label) for label in labels) > 4
    axes.set_xticks(np.arange(width) + 0.5, labels, rotation=45 if turned else 0, ha="right" if turned else "center")
    step = max(1, layers // 8)
    axes.set_yticks(np.arange(0, layers, step) + 0.5, [str(layer) for layer in range(0, layers, step)])
    figure.colorbar(mesh, ax=axes, label=f"SPS (highest: {values[row, column]:.2f}, ringed)")
    return figure


@styled
def sps_auroc_figure(sps: ArrayLike, auroc: ArrayLike, *, title: str) -> Any:
    """The scatter, with Pearson's correlation; the last five tokens have markers of their own, earlier ones dots."""
    x, y = _table(sps), _table(auroc)
    if x.shape != y.shape:
        raise InputError(f"SPS is {x.shape} and AUROC {y.shape}: both must be [layers, tokens] of the same states")
    figure = new_figure(5.2, 3.8)
    axes = figure.add_subplot()
    looks = [(OURS_COLOUR, "o"), *((colour, marker) for colour, marker, _ in LINES)]
    for back in range(x.shape[1], 0, -1):
        known = np.isfinite(x[:, -back]) & np.isfinite(y[:, -back])
        colour, marker = looks[back - 1] if back <= len(looks) else (INK, ".")
        label = f"token -{back}" if back <= len(looks) else ("earlier" if back == x.shape[1] else None)
        axes.plot(x[known, -back], y[known, -back], marker, color=colour, markersize=5, alpha=0.75, label=label)
    dress(axes, title=title, x="Semantic Preservation Score", y="AUROC of SemGrad with this state")
    axes.legend(frameon=False, fontsize=8.5)
    axes.text(0.98, 0.02, _correlation(x, y), transform=axes.transAxes, ha="right", va="bottom", fontsize=9)
    return figure


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 3 or np.ptp(x[known]) == 0 or np.ptp(y[known]) == 0:
        return "no correlation: too few states, or all alike"
    return f"r = {np.corrcoef(x[known], y[known])[0, 1]:.2f} over {int(known.sum())} states"


def _table(values: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 2 or not found.size or not np.isfinite(found).any():
        raise InputError(f"a map of hidden states is [layers, tokens] with finite numbers; this one is {found.shape}")
    return found
