"""Figures: what they draw, on any run; as files, and as SVG that can share a page with others."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from semgrad_guard import metrics
from semgrad_guard.errors import InputError
from semgrad_guard.paper import figures
from semgrad_guard.paper.drawing import inline_svg, save
from semgrad_guard.paper.figures import BETAS, TAUS, hybrid
from semgrad_guard.paper.graded import GradedRun
from semgrad_guard.paper.intervals import crossfitted
from tests.made_answers import example_run

RUN = example_run(n=120, methods=("HybridGrad", "SemGrad", "ParaGrad", "SAR", "Deg", "G-NLL", "M.I."))
SPS = np.add.outer(np.arange(6), np.arange(4)) / 10.0


def drawn(run: GradedRun) -> list[Any]:
    confidence = {method: crossfitted(scores, run.correct) for method, scores in run.scores.items()}
    return [
        figures.risk_coverage_figure(run),
        figures.reliability_figure(run, confidence),
        figures.histogram_figure(run),
        figures.entropy_figure(run),
    ]


def test_risk_coverage_puts_hybridgrad_in_front() -> None:
    (axes,) = figures.risk_coverage_figure(RUN).axes
    lines = {line.get_label(): line for line in axes.lines}
    ours = lines["HybridGrad"]
    assert ours.get_linewidth() == max(line.get_linewidth() for line in axes.lines)
    curve = metrics.risk_coverage(RUN.scores["HybridGrad"], RUN.correct)
    assert ours.get_ydata()[-1] == pytest.approx(1 - RUN.accuracy)
    np.testing.assert_allclose(np.interp(ours.get_xdata(), curve.coverage, curve.risk), ours.get_ydata())
    best = sorted((m for m in RUN.scores if m != "HybridGrad"), key=lambda m: metrics.aurc(RUN.scores[m], RUN.correct))  # type: ignore[arg-type,return-value]
    assert {label for label in lines if not label.startswith("_")} == {"HybridGrad", *best[:4]}
    assert axes.get_legend().get_title().get_text() == "grey: 2 other methods"


def test_hybrid_is_the_papers_mixture() -> None:
    found = hybrid(np.array([2.0]), np.array([5.0]), np.array([0.3]), tau=0.5, beta=3.0)
    a = math.exp(-0.3 / 0.5)
    assert found[0] == pytest.approx((1 - a) * 2.0 + 3.0 * a * 5.0)


def test_entropy_shows_the_percentiles_of_right_answers_and_a_curve_for_each_beta() -> None:
    left, right = figures.entropy_figure(RUN).axes
    entropy = np.array(RUN.mean_entropy, dtype=float)[np.array(RUN.correct)]
    assert [line.get_xdata()[0] for line in left.lines] == pytest.approx(np.percentile(entropy, [50, 75]))
    counts = [sum(patch.get_height() for patch in bars) for bars in left.containers]
    assert counts == [120, sum(RUN.correct)]
    curves = {line.get_label(): line.get_ydata() for line in right.lines if line.get_label().startswith("beta")}
    assert list(curves) == [f"beta {beta:g}" for beta in BETAS]
    semgrad = metrics.auroc(RUN.scores["SemGrad"], RUN.correct)
    assert curves["beta 1"][0] == pytest.approx(semgrad, abs=0.02)  # small tau: SemGrad alone
    parts = (np.array(RUN.scores[m], dtype=float) for m in ("SemGrad", "ParaGrad"))
    middle = hybrid(*parts, np.array(RUN.mean_entropy, dtype=float), tau=TAUS[12], beta=2.0)
    assert curves["beta 2"][12] == metrics.auroc(middle.tolist(), RUN.correct)


def test_histograms_count_right_and_wrong_answers() -> None:
    figure = figures.histogram_figure(RUN)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [
        "Deg",
        "M.I.",
        "G-NLL",
        "SAR",
        "ParaGrad",
        "SemGrad",
        "HybridGrad",
    ]
    for axes in shown:
        assert axes.get_xscale() == "log"
        assert sum(patch.get_height() for patch in axes.containers[0]) == sum(RUN.correct)
    linear = replace(RUN, scores={"Deg": [0.1, 0.2] * 60, "INSIDE": [-1.0, 900.0] * 60})
    assert {axes.get_xscale() for axes in figures.histogram_figure(linear).axes} == {"linear"}


def test_the_heat_map_is_the_table_with_its_highest_score_ringed(tmp_path: Path) -> None:
    figure = figures.sps_figure(SPS, title="T", tokens=["a", "b", "<|im_start|>", "d"])
    axes = figure.axes[0]
    np.testing.assert_array_equal(np.asarray(axes.collections[0].get_array()).reshape(6, 4), SPS)
    (ring,) = axes.lines
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (3.5, 5.5)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "<|im_start|>", "d"]
    assert [t.get_text() for t in figures.sps_figure(SPS, title="").axes[0].get_xticklabels()] == [
        "-4",
        "-3",
        "-2",
        "-1",
    ]
    assert save(figures.sps_figure(SPS, title="T"), tmp_path / "sps.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "sps.png"]


def test_sps_against_auroc_has_a_point_per_state_and_says_the_correlation(tmp_path: Path) -> None:
    auroc = 0.5 + SPS / 4
    auroc[0, 0] = np.nan
    axes = figures.sps_auroc_figure(SPS, auroc, title="T").axes[0]
    assert sum(len(line.get_xdata()) for line in axes.lines) == SPS.size - 1
    assert axes.texts[0].get_text() == "r = 1.00 over 23 states"
    flat = figures.sps_auroc_figure(SPS, np.full(SPS.shape, 0.5), title="T").axes[0]
    assert flat.texts[0].get_text().startswith("no correlation")
    assert save(figures.sps_auroc_figure(SPS, auroc, title="T"), tmp_path / "a.svg").exists()


def test_maps_of_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[layers, tokens\]"):
        figures.sps_figure([0.1, 0.2], title="")
    with pytest.raises(InputError, match="finite"):
        figures.sps_figure(np.full((2, 2), np.nan), title="")
    with pytest.raises(InputError, match="same states"):
        figures.sps_auroc_figure(SPS, SPS[:3], title="")
    with pytest.raises(InputError, match=r"\.png"):
        save(figures.sps_figure(SPS, title=""), tmp_path / "a.bmp")


def test_inline_svg_can_stand_beside_others() -> None:
    one, other = (inline_svg(figures.risk_coverage_figure(RUN), name, description='a "b" & <c>') for name in "xy")
    found = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, other)]
    assert found[0]
    assert not found[0] & found[1]
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', one)) <= found[0]
    root = ElementTree.fromstring(one)  # noqa: S314 - our own drawing
    assert root.get("aria-label") == 'a "b" & <c>'
    assert root.get("viewBox")
    assert root.get("width") is None
    assert "var(--ink)" in one
    assert "#1f2933" not in one
    assert "HybridGrad</text>" in one


def test_drawing_leaves_the_users_style_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn(RUN)
    assert dict(matplotlib.rcParams) == before
