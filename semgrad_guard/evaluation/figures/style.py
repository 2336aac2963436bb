"""How figures look, and the two ways out: a picture file, or SVG inside a page that follows its light or dark colours.

Lines differ by marker and dash as well as by colour (Okabe & Ito's, told apart by colour-blind readers), so that a
black and white print can be read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import wraps
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from semgrad_guard.evaluation.figures.plots import FAINT, INK, MUTED, STYLE, require_drawable, settled
from semgrad_guard.files import atomic_write

P = ParamSpec("P")
T = TypeVar("T")

RIGHT, WRONG, OURS_COLOUR = "#0072b2", "#d55e00", "#0072b2"
LINES = (
    ("#d55e00", "s", (0, (6, 2))),
    ("#009e73", "^", (0, (3, 1.5))),
    ("#cc79a7", "D", (0, (6, 2, 1.5, 2))),
    ("#b8860b", "v", (0, (1.5, 1.5))),
)
"""(colour, marker, dash) of the lines beside HybridGrad's."""

_PAGE_COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", FAINT: "var(--faint)", "#ffffff": "var(--paper)"}


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


def dress(axes: Any, *, title: str = "", x: str = "", y: str = "", grid: bool = True, width: int = 60) -> None:
    """Labels, a light grid, and no frame where nothing is measured; titles are cut at `width` characters."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(plain(title, width=width), loc="left", fontsize=10.5, fontweight="bold")
    if grid:
        axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain(text: str, *, width: int = 200) -> str:
    """A name as matplotlib should write it: no formula between dollar signs, no line breaks, nothing invisible."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return (shown if len(shown) <= width else shown[: width - 1] + "…").replace("$", r"\$")


def percent_axis(axis: Any, *, digits: int | None = 0) -> None:
    """Write an axis of shares in per cent; `digits` None where the range decides how many decimals."""
    axis.set_major_formatter(import_module("matplotlib.ticker").PercentFormatter(1.0, decimals=digits))


@styled
def save(figure: Any, path: str | Path) -> Path:
    """Write the figure; the suffix decides the format (.png, .svg, .pdf).

    Raises:
        MissingExtraError: matplotlib is absent.
        InputError: no picture format by that suffix, or it cannot be written.
    """
    target = Path(path)
    require_drawable(target)
    return atomic_write(target, lambda beside: figure.savefig(beside, **settled(target)))


@styled
def inline_svg(figure: Any, name: str, *, description: str) -> str:
    """The figure as an `<svg>` element for a page.

    Args:
        figure: a matplotlib figure.
        name: letters and digits; the prefix of every id in it, so that two figures of a page do not meet.
        description: what it shows, for those who cannot see it; no control characters.
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
