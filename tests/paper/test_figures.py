"""Figures: what they draw, on any run; as files, and as SVG that can share a page with others."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from semgrad_guard import calibrate, errors, metrics
from semgrad_guard.errors import InputError, MissingExtraError
from semgrad_guard.paper import drawing, report
from semgrad_guard.paper.drawing import draw_risk_coverage, inline_svg, require_drawable, save
from semgrad_guard.paper.report import BETAS, TAUS, hybrid
from tests.made_answers import example_run

RUN = example_run(n=120, methods=("HybridGrad", "SemGrad", "ParaGrad", "SAR", "Deg", "G-NLL", "M.I."))
SPS = np.add.outer(np.arange(6), np.arange(4)) / 10.0


def test_risk_coverage_puts_hybridgrad_in_front() -> None:
    (axes,) = report.risk_coverage_figure(RUN).axes
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
    left, right = report.entropy_figure(RUN).axes
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


def test_the_heat_map_is_the_table_with_its_highest_score_ringed(tmp_path: Path) -> None:
    figure = report.sps_figure(SPS, title="T", tokens=["a", "b", "<|im_start|>", "d"])
    axes = figure.axes[0]
    np.testing.assert_array_equal(np.asarray(axes.collections[0].get_array()).reshape(6, 4), SPS)
    (ring,) = axes.lines
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (3.5, 5.5)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "<|im_start|>", "d"]
    assert [t.get_text() for t in report.sps_figure(SPS, title="").axes[0].get_xticklabels()] == [
        "-4",
        "-3",
        "-2",
        "-1",
    ]
    assert save(report.sps_figure(SPS, title="T"), tmp_path / "sps.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "sps.png"]


def test_sps_against_auroc_has_a_point_per_state_and_says_the_correlation(tmp_path: Path) -> None:
    auroc = 0.5 + SPS / 4
    auroc[0, 0] = np.nan
    axes = report.sps_auroc_figure(SPS, auroc, title="T").axes[0]
    assert sum(len(line.get_xdata()) for line in axes.lines) == SPS.size - 1
    assert axes.texts[0].get_text() == "r = 1.00 over 23 states"
    flat = report.sps_auroc_figure(SPS, np.full(SPS.shape, 0.5), title="T").axes[0]
    assert flat.texts[0].get_text().startswith("no correlation")
    assert save(report.sps_auroc_figure(SPS, auroc, title="T"), tmp_path / "a.svg").exists()


def test_maps_of_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[layers, tokens\]"):
        report.sps_figure([0.1, 0.2], title="")
    with pytest.raises(InputError, match="finite"):
        report.sps_figure(np.full((2, 2), np.nan), title="")
    with pytest.raises(InputError, match="same states"):
        report.sps_auroc_figure(SPS, SPS[:3], title="")
    with pytest.raises(InputError, match=r"\.png"):
        save(report.sps_figure(SPS, title=""), tmp_path / "a.bmp")


def test_inline_svg_can_stand_beside_others() -> None:
    one, other = (inline_svg(report.risk_coverage_figure(RUN), name, description='a "b" & <c>') for name in "xy")
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


RNG = np.random.default_rng(0)
CORRECT = (RNG.random(300) < 0.7).tolist()
SCORES = RNG.normal(np.where(CORRECT, 0.0, 2.0), 1.0).tolist()


def svg(path: Path) -> str:
    return path.read_text()


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_decides_the_format(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    path = draw_risk_coverage(tmp_path / f"risk{suffix}", SCORES, CORRECT)
    assert path.read_bytes().startswith(beginning)
    assert list(tmp_path.iterdir()) == [path]


def test_the_operating_point_says_coverage_and_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drawing.STYLE, "svg.fonttype", "none")
    found = calibrate(SCORES, CORRECT, alpha=0.1, delta=0.1)
    assert found.threshold is not None
    text = svg(
        draw_risk_coverage(tmp_path / "a.svg", SCORES, CORRECT, calibration=found, title="T", label="HybridGrad")
    )
    assert f"{found.coverage:.0%} answered" in text
    let_through = [right for score, right in zip(SCORES, CORRECT, strict=True) if score <= found.threshold]
    assert f"{1 - np.mean(let_through):.1%} of them wrong" in text
    assert "promised: at most 10%, with 90% probability" in text
    for label in ("random", "oracle", "HybridGrad", "promised: at most 10%"):
        assert label in text


def test_without_a_threshold_the_picture_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drawing.STYLE, "svg.fonttype", "none")
    found = calibrate(SCORES, [False] * 300, alpha=0.1, delta=0.1)
    assert "no threshold keeps it" in svg(draw_risk_coverage(tmp_path / "a.svg", SCORES, CORRECT, calibration=found))


def test_the_same_data_draw_the_same_bytes(tmp_path: Path) -> None:
    one, two = (draw_risk_coverage(tmp_path / name, SCORES, CORRECT).read_bytes() for name in ("a.svg", "b.svg"))
    assert one == two


def test_an_unknown_suffix_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        draw_risk_coverage(tmp_path / "a.bmp", SCORES, CORRECT)
    with pytest.raises(InputError, match="Cannot write"):
        draw_risk_coverage(tmp_path / "missing" / "a.png", SCORES, CORRECT)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'semgrad-guard\[eval\]'"):
        require_drawable(tmp_path / "a.png")
