"""Draw the cost of scoring against the answer's length and against the batch's size, from `scoring.py`'s figures.

    python benchmarks/pictures.py output/scoring-full.json --output docs/cost.svg [--dtype float32]

Above, the share of plain greedy generation; below, decode steps. Lines are medians, bands reach from the least to the
greatest round; marks and dashes differ, so that nothing is lost in grey.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter
from shapes import Setting

from semgrad_guard.errors import InputError
from semgrad_guard.paper.drawing import FAINT, INK, LINE, MUTED, POINT, STYLE, settled

Row = Mapping[str, Any]
PROMPT = 60


@dataclass(frozen=True)
class Curve:
    """One way through the settings: how it is called and drawn, and its median, least and greatest in a row."""

    label: str
    color: str
    line: str
    mark: str
    read: Callable[[Row], Sequence[float] | None]


def share(way: str) -> Callable[[Row], Sequence[float] | None]:
    """A way's share of plain generation."""
    return lambda row: row["share_of_plain"].get(way)


SHARES = (
    Curve("official algorithm", MUTED, ":", "^", share("naive")),
    Curve("HybridGrad of any text", POINT, "--", "s", share("read")),
    Curve("HybridGrad", LINE, "-", "o", share("written")),
)
STEPS = (Curve("HybridGrad", LINE, "-", "o", lambda row: row.get("decode_steps")),)


def setting_of(name: str) -> Setting:
    """A row's setting, from its name: "60/8" or "60/8 x3".

    Raises:
        InputError: no such name.
    """
    found = re.fullmatch(r"(\d+)/(\d+)(?: x(\d+))?", name)
    if found is None:
        raise InputError(f"{name!r} is no setting such as '60/8 x3'; is this a file that scoring.py wrote?")
    return Setting(int(found[1]), int(found[2]), int(found[3] or 1))


def by_answer(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Single answers to the short prompt, by length."""
    return _along(rows, lambda s: s.answer if (s.prompt, s.rows) == (PROMPT, 1) else None)


def by_batch(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Batches of the short prompt by size, of the answer's length that was measured at most sizes."""
    settings = [setting_of(row["setting"]) for row in rows]
    lengths = [s.answer for s in settings if s.prompt == PROMPT and s.rows > 1]
    length = statistics.mode(lengths) if lengths else None
    return _along(rows, lambda s: s.rows if (s.prompt, s.answer) == (PROMPT, length) else None)


def _along(rows: Sequence[Row], place: Callable[[Setting], int | None]) -> list[tuple[int, Row]]:
    placed = [(place(setting_of(row["setting"])), row) for row in rows]
    return sorted(((x, row) for x, row in placed if x is not None), key=lambda pair: pair[0])


def draw(report: Mapping[str, Any], dtype: str, target: Path) -> Path:
    """The picture of the rows in one dtype.

    Raises:
        InputError: no row of that dtype.
    """
    rows = [row for row in report["rows"] if row["dtype"] == dtype]
    if not rows:
        known = sorted({row["dtype"] for row in report["rows"]})
        raise InputError(f"no figures in {dtype}; there are some in {', '.join(known)}")
    answers, batches = by_answer(rows), by_batch(rows)
    length = setting_of(batches[0][1]["setting"]).answer if batches else ""
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(7.6, 5.4), dpi=120, layout="constrained")
        grid = figure.subplots(2, 2, sharex="col", sharey="row", squeeze=False)
        for axes in grid.flat:
            axes.grid(color=FAINT)
            axes.spines[["top", "right"]].set_visible(False)
        _panel(grid[0, 0], answers, SHARES, y="share of plain generation")
        _panel(grid[0, 1], batches, SHARES)
        _panel(grid[1, 0], answers, STEPS, y="decode steps", x="tokens in the answer")
        _panel(grid[1, 1], batches, STEPS, x=f"answers of {length} tokens in a batch")
        for axes in grid[0]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        for axes in grid[1]:
            axes.set_ylim(bottom=0)
        grid[0, 0].set_title(f"One answer to a prompt of {PROMPT} tokens", loc="left", fontsize=10)
        grid[0, 1].set_title("Batches", loc="left", fontsize=10)
        machine = report["machine"]
        shown = f"{report['shape']} shape, {dtype}; {machine['cpu']}; {machine['date']}"
        figure.suptitle(shown, fontsize=8, color=MUTED)
        figure.savefig(target, **settled(target))
    return target


def _panel(axes: Any, cells: Sequence[tuple[int, Row]], curves: Sequence[Curve], *, x: str = "", y: str = "") -> None:
    for curve in curves:
        points = [(at, found) for at, row in cells if (found := curve.read(row)) is not None]
        if not points:
            continue
        places = [at for at, _ in points]
        middle, low, high = (list(values) for values in zip(*(found for _, found in points), strict=True))
        style = {"color": curve.color, "linestyle": curve.line, "marker": curve.mark}
        axes.plot(places, middle, label=curve.label, linewidth=1.8, markersize=5, zorder=3, **style)
        axes.fill_between(places, low, high, color=curve.color, alpha=0.15, linewidth=0)
    places = sorted({at for at, _ in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(at) for at in places])
    axes.xaxis.set_minor_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what scoring.py --output wrote")
    parser.add_argument("--output", type=Path, default=Path("output/cost.svg"), help=".svg, .png or .pdf")
    parser.add_argument("--dtype", help="which rows (the first row's)")
    arguments = parser.parse_args()
    report = json.loads(arguments.figures.read_text())
    print(draw(report, arguments.dtype or report["rows"][0]["dtype"], arguments.output))


if __name__ == "__main__":
    main()
