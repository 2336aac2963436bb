"""The figures of the paper and of the report; matplotlib (extra `eval`) is imported when one is drawn."""

from __future__ import annotations

from semgrad_guard.evaluation.figures.entropy import entropy_figure, has_entropy
from semgrad_guard.evaluation.figures.selective import risk_coverage_figure
from semgrad_guard.evaluation.figures.spread import histogram_figure, reliability_figure
from semgrad_guard.evaluation.figures.sps import (
    ProbeMaps,
    draw_sps,
    draw_sps_against_auroc,
    sps_auroc_figure,
    sps_figure,
)
from semgrad_guard.evaluation.figures.style import inline_svg, save

__all__ = [
    "ProbeMaps",
    "draw_sps",
    "draw_sps_against_auroc",
    "entropy_figure",
    "has_entropy",
    "histogram_figure",
    "inline_svg",
    "reliability_figure",
    "risk_coverage_figure",
    "save",
    "sps_auroc_figure",
    "sps_figure",
]
