"""The picture: drawn for every kind of calibration, whole or not at all, and refused before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from semgrad_guard import calibrate, errors
from semgrad_guard.errors import InputError, MissingExtraError
from semgrad_guard.paper import drawing
from semgrad_guard.paper.drawing import draw_risk_coverage, require_drawable

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


@pytest.mark.parametrize(
    ("scores", "correct"),
    [
        ([0.1], [True]),
        ([0.1, 0.2], [True, True]),
        ([0.1, 0.1], [False, False]),
        ([None, 0.3], [True, False]),
        ([None], [False]),
    ],
)
def test_degenerate_sets_are_drawn(tmp_path: Path, scores: list[float | None], correct: list[bool]) -> None:
    found = calibrate(scores, correct, alpha=0.1, delta=0.1)
    assert draw_risk_coverage(tmp_path / "a.png", scores, correct, calibration=found).stat().st_size > 1000


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
