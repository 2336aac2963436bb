"""The figures of the paper and of the report; matplotlib (extra `eval`) is imported when one is drawn."""

from semgrad_guard.evaluation.figures.entropy import entropy_figure as entropy_figure
from semgrad_guard.evaluation.figures.entropy import has_entropy as has_entropy
from semgrad_guard.evaluation.figures.selective import risk_coverage_figure as risk_coverage_figure
from semgrad_guard.evaluation.figures.spread import histogram_figure as histogram_figure
from semgrad_guard.evaluation.figures.spread import reliability_figure as reliability_figure
from semgrad_guard.evaluation.figures.sps import ProbeMaps as ProbeMaps
from semgrad_guard.evaluation.figures.sps import draw_sps as draw_sps
from semgrad_guard.evaluation.figures.sps import draw_sps_against_auroc as draw_sps_against_auroc
from semgrad_guard.evaluation.figures.sps import sps_auroc_figure as sps_auroc_figure
from semgrad_guard.evaluation.figures.sps import sps_figure as sps_figure
from semgrad_guard.evaluation.figures.style import inline_svg as inline_svg
from semgrad_guard.evaluation.figures.style import save as save
