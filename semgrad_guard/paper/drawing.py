"""How figures look, and their two ways out: a picture file, or SVG in a page that follows its light or dark colours.

Lines differ by marker and dash as well as by colour (Okabe and Ito's palette for colour-blind readers), so that a black
and white print can be read. matplotlib (extra `eval`) is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import wraps
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.errors import InputError, require_installed
from semgrad_guard.files import atomic_write
from semgrad_guard.metrics import risk_coverage

P = ParamSpec("P")
T = TypeVar("T")

SUFFIXES = (".png", ".svg", ".pdf")
INK, MUTED, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
LINE, PROMISE, POINT = "#2457a6", "#c2410c", "#0f766e"
RIGHT, WRONG, OURS_COLOUR = "#0072b2", "#d55e00", "#0072b2"
LINES = (
    ("#d55e00", "s", (0, (6, 2))),
    ("#009e73", "^", (0, (3, 1.5))),
    ("#cc79a7", "D", (0, (6, 2, 1.5, 2))),
    ("#b8860b", "v", (0, (1.5, 1.5))),
)
"""(colour, marker, dash) of the lines other than HybridGrad's."""
RANDOM: dict[str, Any] = {"color": MUTED, "linestyle": (0, (5, 3)), "linewidth": 1.3}
ORACLE: dict[str, Any] = {"color": MUTED, "linestyle": (0, (1, 1.6)), "linewidth": 1.6}
STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.hashsalt": "semgrad-guard",
}

_PAGE_COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", FAINT: "var(--faint)", "#ffffff": "var(--paper)"}
_DRAWN = "drawn by semgrad-guard"
"""In the metadata of every picture."""


def require_drawable(path: Path) -> None:
    """Raise, before any work, if a picture could not be drawn at `path`.

    Raises:
        MissingExtraError: matplotlib is absent.
        InputError: the suffix is not one of a picture format.
    """
    require_installed("matplotlib", extra="eval")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"the suffix of a picture is one of {', '.join(SUFFIXES)}; it is {path.suffix!r} in {path}")


def is_drawn(path: Path) -> bool:
    """Whether a file is a picture of ours."""
    return path.suffix.lower() in SUFFIXES and _DRAWN.encode() in path.read_bytes()


def settled(target: Path) -> dict[str, Any]:
    """Options of `savefig`: who drew it, and no dates, so that the same data draw the same picture, byte for byte."""
    kind = target.suffix.lower().lstrip(".")
    metadata: dict[str, dict[str, str | None]] = {
        "svg": {"Creator": _DRAWN, "Date": None},
        "pdf": {"Creator": _DRAWN, "CreationDate": None},
        "png": {"Software": _DRAWN},
    }
    return {"format": kind, "metadata": metadata[kind]}


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Run with the project's matplotlib style, and leave the user's as it was."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with import_module("matplotlib").rc_context(STYLE):
            return draw(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    return import_module("matplotlib.figure").Figure(figsize=(width, height), dpi=200, layout="constrained")


def dress(
    axes: Any, *, title: str = "", x: str = "", y: str = "", grid: bool = True, width: int = 60, **look: Any
) -> None:
    """Labels, a light grid, and no frame on two sides; a title is cut at `width` characters and has this `look`."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(plain(title, width=width), loc="left", fontweight="bold", **{"fontsize": 10.5, **look})
    if grid:
        axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def dress_risk(axes: Any, *, top: float, title: str = "", **look: Any) -> None:
    """The axes of risk against coverage, in per cent; `top` is the upper end of the risk axis."""
    labels = {"x": "coverage: share of questions answered", "y": "risk: share of those that are wrong"}
    dress(axes, title=title, **labels, **look)
    axes.set(xlim=(0, 1.002), ylim=(0, top))
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)


def plain(text: str, *, width: int = 200) -> str:
    """A name as matplotlib should write it: no formula between dollar signs, no line breaks, nothing invisible."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return (shown if len(shown) <= width else shown[: width - 1] + "…").replace("$", r"\$")


def percent_axis(axis: Any, *, digits: int | None = 0) -> None:
    """Write an axis of shares in per cent; with `digits` None the range decides how many decimals."""
    axis.set_major_formatter(import_module("matplotlib.ticker").PercentFormatter(1.0, decimals=digits))


@styled
def save(figure: Any, path: str | Path) -> Path:
    """Write the figure; the suffix decides the format (.png, .svg, .pdf).

    Raises:
        MissingExtraError: matplotlib is absent.
        InputError: the suffix is not one of a picture format, or the file cannot be written.
    """
    target = Path(path)
    require_drawable(target)
    return atomic_write(target, lambda beside: figure.savefig(beside, **settled(target)))


@styled
def inline_svg(figure: Any, name: str, *, description: str) -> str:
    """The figure as an `<svg>` element for a page.

    Args:
        figure: a matplotlib figure.
        name: letters and digits; the prefix of every id in it, so that the ids of two figures in a page differ.
        description: the content in words, for those who cannot see it; no control characters.
    """
    text = io.StringIO()
    with import_module("matplotlib").rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue()[text.getvalue().index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in _PAGE_COLOURS.items():
        svg = svg.replace(colour, variable)
    opening = f'<svg role="img" aria-label="{escape(description, quote=True)}" '
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', lambda found: opening + found[1], svg, count=1)


@styled
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
        path: the file; the suffix decides the format (.png, .svg, .pdf).
        uncertainties: one per answer, None without a score.
        correct: one per answer.
        calibration: adds the promised error rate and the operating point, with its coverage and upper bound.
        title: above the picture.
        label: the name of the estimator's curve.
    """
    require_drawable(Path(path))
    curve = risk_coverage(uncertainties, correct)
    figure = new_figure(7.4, 4.6)
    axes = figure.add_subplot()
    base = 1.0 - sum(correct) / len(correct)
    # The first few answers, where one error is a high rate, do not stretch the axis.
    risks = curve.risk[max(0, len(curve.risk) // 20) :].tolist()
    top = min(1.02, max(0.04, 1.35 * max([base, *risks, 0.0 if calibration is None else calibration.alpha])))
    dress_risk(axes, top=top, title=title, width=200, fontsize=12, pad=10)
    axes.plot(curve.coverage, curve.risk, color=LINE, linewidth=2.2, zorder=4, label=label)
    axes.plot([0, 1], [base, base], label="random", **RANDOM)
    ideal = risk_coverage([0.0 if right else 1.0 for right in correct], correct)
    axes.plot(ideal.coverage, ideal.risk, label="oracle", **ORACLE)
    if calibration is not None:
        reached = min(len(curve.risk), max(1, round(calibration.coverage * len(correct))))
        _draw_promise(axes, calibration, risk=float(curve.risk[reached - 1]) if reached else 0.0, top=top)
    axes.legend(loc="upper left", frameon=False, ncols=2, fontsize=9)
    return save(figure, path)


def _draw_promise(axes: Any, calibration: Calibration, *, risk: float, top: float) -> None:
    """The promised rate, and the operating point in words: left of it and above the rate, where no curve is."""
    alpha, coverage = calibration.alpha, calibration.coverage
    axes.axhline(alpha, color=PROMISE, linewidth=1.3, zorder=3, label=f"promised: at most {alpha:.0%}")
    if calibration.threshold is None:
        axes.text(0.99, alpha + 0.015 * top, "no threshold keeps it", color=PROMISE, ha="right", fontsize=9)
        return
    axes.axvspan(0, coverage, color=POINT, alpha=0.06, linewidth=0, zorder=0)
    axes.plot(
        [coverage], [risk], marker="o", color=POINT, markersize=8, markeredgecolor="white", clip_on=False, zorder=6
    )
    from_left = coverage < 0.42
    axes.annotate(
        f"{coverage:.0%} answered, {risk:.1%} of them wrong\n"
        f"promised: at most {alpha:.0%}, with {1 - calibration.delta:.0%} probability",
        (0.0 if from_left else coverage, alpha + 0.035 * top),
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
