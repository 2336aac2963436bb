"""The risk-coverage picture: what share of the answers is let through, and how many of those are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.errors import InputError, MissingExtraError
from semgrad_guard.evaluation.metrics import RiskCoverage, risk_coverage
from semgrad_guard.files import atomic_write

SUFFIXES = (".png", ".svg", ".pdf")
_DRAWN = "drawn by semgrad-guard"
"""Stands in every picture's file, and nowhere to be seen."""

INK, MUTED, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
LINE, PROMISE, POINT = "#2457a6", "#c2410c", "#0f766e"
STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.hashsalt": "semgrad-guard",
}


def require_drawable(path: Path) -> None:
    """Raise, before any work, where no picture could be drawn at `path`.

    Raises:
        MissingExtraError: matplotlib is absent.
        InputError: no picture format by that suffix.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", extra="eval")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"the suffix of a picture is one of {', '.join(SUFFIXES)}; it is {path.suffix!r} in {path}")


def is_drawn(path: Path) -> bool:
    """Whether a file is a picture of ours."""
    return path.suffix.lower() in SUFFIXES and _DRAWN.encode() in path.read_bytes()


def draw_risk_coverage(
    path: str | Path,
    uncertainties: Sequence[float | None],
    correct: Sequence[bool],
    *,
    calibration: Calibration | None = None,
    title: str = "",
    label: str = "uncertainty",
) -> Path:
    """Draw selective risk against coverage, between the random baseline and the oracle.

    Args:
        path: where to; the suffix decides the format (.png, .svg, .pdf).
        uncertainties: one per answer, None where there is no score.
        correct: one per answer.
        calibration: adds the promised error rate and the operating point, with its coverage and upper bound.
        title: above the picture.
        label: what the estimator's curve is called.
    """
    target = Path(path)
    require_drawable(target)
    curve = risk_coverage(uncertainties, correct)
    with import_module("matplotlib").rc_context(STYLE):
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(7.4, 4.6), dpi=200, layout="constrained")
        axes = figure.add_subplot()
        base = 1.0 - float(np.mean(np.asarray(correct, dtype=float)))
        top = _top(curve, base, calibration)
        _dress(axes, import_module("matplotlib.ticker").PercentFormatter(1.0, decimals=0), top, title)
        axes.plot(curve.coverage, curve.risk, color=LINE, linewidth=2.2, zorder=4, label=label)
        _draw_baselines(axes, base, correct)
        if calibration is not None:
            _draw_promise(axes, curve, calibration, top)
        axes.legend(loc="upper left", frameon=False, ncols=2, fontsize=9)
        return atomic_write(target, lambda beside: figure.savefig(beside, **settled(target)))


def _top(curve: RiskCoverage, base: float, calibration: Calibration | None) -> float:
    """The upper end of the risk axis; the first few answers, where one error is a high rate, do not stretch it."""
    settled = curve.risk[max(0, len(curve.risk) // 20) :]
    highest = max([base, *settled.tolist(), 0.0 if calibration is None else calibration.alpha])
    return min(1.02, max(0.04, 1.35 * highest))


def _dress(axes: Any, percent: Any, top: float, title: str) -> None:
    axes.set(xlim=(0, 1.002), ylim=(0, top))
    axes.set_xlabel("coverage: share of questions answered")
    axes.set_ylabel("risk: share of those that are wrong")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12, pad=10)
    axes.xaxis.set_major_formatter(percent)
    axes.yaxis.set_major_formatter(percent)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_baselines(axes: Any, base: float, correct: Sequence[bool]) -> None:
    """Random answers are wrong at the base rate; an oracle lets every right answer through first."""
    ideal = risk_coverage([0.0 if right else 1.0 for right in correct], correct)
    axes.plot([0, 1], [base, base], color=MUTED, linestyle=(0, (5, 3)), linewidth=1.3, label="random")
    axes.plot(ideal.coverage, ideal.risk, color=MUTED, linestyle=(0, (1, 1.6)), linewidth=1.6, label="oracle")


def _draw_promise(axes: Any, curve: RiskCoverage, calibration: Calibration, top: float) -> None:
    alpha, coverage, bound = calibration.alpha, calibration.coverage, calibration.risk_bound
    axes.axhline(alpha, color=PROMISE, linewidth=1.3, zorder=3, label=f"promised: at most {alpha:.0%}")
    if calibration.threshold is None or bound is None:
        axes.text(0.99, alpha + 0.015 * top, "no threshold keeps it", color=PROMISE, ha="right", fontsize=9)
        return
    risk = float(curve.risk[min(len(curve.risk), max(1, round(coverage / curve.coverage[0]))) - 1])
    axes.axvspan(0, coverage, color=POINT, alpha=0.06, linewidth=0, zorder=0)
    axes.plot([coverage, coverage], [risk, bound], color=POINT, linewidth=2.4, solid_capstyle="butt", zorder=5)
    axes.plot([coverage], [bound], marker="_", color=POINT, markersize=12, markeredgewidth=2.4, zorder=5)
    axes.plot(
        [coverage], [risk], marker="o", color=POINT, markersize=8, markeredgecolor="white", clip_on=False, zorder=6
    )
    _explain(axes, calibration, risk, height=alpha + 0.035 * top)


def _explain(axes: Any, calibration: Calibration, risk: float, *, height: float) -> None:
    """The operating point in words, left of it and above the promise: the curve is below the promise there."""
    coverage = calibration.coverage
    from_left = coverage < 0.42
    axes.annotate(
        f"{coverage:.0%} answered, {risk:.1%} of them wrong\n"
        f"at most {calibration.risk_bound:.1%}, with {1 - calibration.delta:.0%} probability",
        (0.0 if from_left else coverage, height),
        xytext=(6 if from_left else -6, 0),
        textcoords="offset points",
        ha="left" if from_left else "right",
        va="bottom",
        color=POINT,
        fontsize=9,
        fontweight="bold",
        zorder=7,
        bbox={"boxstyle": "square,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
    )


def settled(target: Path) -> dict[str, Any]:
    """Who drew it, and no dates in the file: the same data draw the same picture, byte for byte."""
    kind = target.suffix.lower().lstrip(".")
    said: dict[str, dict[str, str | None]] = {
        "svg": {"Creator": _DRAWN, "Date": None},
        "pdf": {"Creator": _DRAWN, "CreationDate": None},
        "png": {"Software": _DRAWN},
    }
    return {"format": kind, "metadata": said[kind]}
