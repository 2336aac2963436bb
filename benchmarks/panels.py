"""Pictures of several panels: the look of the project's other pictures, and the same file from the same figures."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from semgrad_guard.files import atomic_write
from semgrad_guard.paper.drawing import FAINT, INK, STYLE, require_drawable, settled


@contextmanager
def drawn(target: Path, *, columns: int, rows: int = 1, height: float = 3.4) -> Generator[tuple[Any, Any]]:
    """A figure and its rows of panels, to be drawn on; the file is written where the block ends.

    A row shares its vertical axis, a column its horizontal one.

    Args:
        target: where to; the suffix decides the format (.png, .svg, .pdf).
        columns: panels side by side.
        rows: panels one above the other.
        height: in inches.

    Raises:
        InputError: no picture format by that suffix.
    """
    require_drawable(target)
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(7.6, height), dpi=120, layout="constrained")
        grid = figure.subplots(rows, columns, sharex="col", sharey="row", squeeze=False)
        for axes in grid.flat:
            axes.grid(color=FAINT)
            axes.spines[["top", "right"]].set_visible(False)
        yield figure, grid
        atomic_write(target, lambda path: figure.savefig(path, **settled(target)))


def legend(axes: Any) -> None:
    """The legend of the lines."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
