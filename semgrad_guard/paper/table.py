"""Tables: rows of estimates under grouped columns, the best entries marked; as HTML and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from semgrad_guard.paper.intervals import Estimate, combined, estimate
from semgrad_guard.questions.data_files import first_line

Better = Literal["higher", "lower"] | None
Mark = Literal["best", "tied", ""]
NOTHING = estimate(float("nan"), np.full(1, np.nan))
"""An entry that is undefined."""


@dataclass(frozen=True)
class Column:
    """A column: `name` under a `group`, and how its numbers are written.

    Numbers are printed times `scale` with `digits` decimals, with a sign if `signed`. `better` tells which way is good,
    None if neither is. `reference` columns hold the figures of other people, which are not marked.
    """

    name: str
    group: str = ""
    better: Better = None
    scale: float = 100.0
    digits: int = 1
    signed: bool = False
    reference: bool = False

    def text(self, value: float | None) -> str:
        """The number as printed; a dash for none."""
        if value is None:
            return "–"
        rounded = round(self.scale * value, self.digits) + 0.0
        return f"{rounded:{'+' if self.signed else ''},.{self.digits}f}".replace("-", "−")


@dataclass(frozen=True)
class Cell:
    """An entry. `note` tells why an undefined one is undefined; `mark` is "best" in its column, or "tied" with it."""

    estimate: Estimate = NOTHING
    note: str = ""
    mark: Mark = ""


@dataclass(frozen=True)
class Row:
    """A named row."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table. `key` names its CSV file, `notes` are printed below it."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    explanation: str = ""
    notes: tuple[str, ...] = ()
    first: str = "Method"

    def groups(self) -> list[tuple[str, int]]:
        """(group, number of columns), for a heading above the columns; [] if no column has a group."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []

    @property
    def intervals(self) -> int:
        """How many columns have an interval."""
        return sum(any(row.cells[i].estimate.low is not None for row in self.rows) for i in range(len(self.columns)))

    def reasons(self) -> list[str]:
        """Why entries are undefined, each reason once."""
        cells = (cell for row in self.rows for cell in row.cells)
        return list(dict.fromkeys(cell.note for cell in cells if cell.note and cell.estimate.value is None))

    def parts(self, width: int) -> list[Table]:
        """The table in pieces of at most `width` columns where groups allow it, for paper; groups stay whole."""
        pieces: list[list[int]] = [[]]
        start = 0
        for _, span in self.groups() or [("", len(self.columns))]:
            if pieces[-1] and len(pieces[-1]) + span > width:
                pieces.append([])
            pieces[-1] += range(start, start + span)
            start += span
        return [
            replace(
                self,
                columns=tuple(self.columns[i] for i in kept),
                rows=tuple(replace(row, cells=tuple(row.cells[i] for i in kept)) for row in self.rows),
            )
            for kept in pieces
        ]

    def csv(self) -> str:
        """The numbers as they are (not times `scale`), each with its interval; empty where undefined."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [f"{column.group}: {column.name}" if column.group else column.name for column in self.columns]
        writer.writerow([self.first, *(f"{name}{part}" for name in names for part in ("", " (low)", " (high)"))])
        for row in self.rows:
            numbers = [n for c in row.cells for n in (c.estimate.value, c.estimate.low, c.estimate.high)]
            writer.writerow([row.name, *("" if n is None else repr(float(n)) for n in numbers)])
        return text.getvalue()


def is_table(path: Path) -> bool:
    """Whether a file is a table of a report: its columns come in threes, a number and the ends of its interval."""
    line = first_line(path).decode(errors="replace")
    header = [name for row in csv.reader([line]) for name in row]
    return len(header) > 1 and all(
        header[i + 1 : i + 3] == [f"{header[i]} (low)", f"{header[i]} (high)"] for i in range(1, len(header), 3)
    )


def marked(table: Table) -> Table:
    """The best entry of each column marked, and those whose difference to it may be chance: its interval holds zero."""
    marks = [_marks(column, [row.cells[i] for row in table.rows]) for i, column in enumerate(table.columns)]
    rows = [
        replace(row, cells=tuple(replace(cell, mark=marks[i][r]) for i, cell in enumerate(row.cells)))
        for r, row in enumerate(table.rows)
    ]
    return replace(table, rows=tuple(rows))


def _marks(column: Column, cells: Sequence[Cell]) -> list[Mark]:
    values = [cell.estimate.value for cell in cells]
    defined = [value for value in values if value is not None]
    if column.better is None or column.reference or len(set(defined)) < 2:
        return [""] * len(cells)
    goal = max(defined) if column.better == "higher" else min(defined)
    best = cells[values.index(goal)].estimate
    return [_mark(cell.estimate, best, goal) for cell in cells]


def _mark(mine: Estimate, best: Estimate, goal: float) -> Mark:
    if mine.value is None:
        return ""
    if mine.value == goal:
        return "best"
    if len(mine.replicates) != len(best.replicates) or mine.low is None:
        return ""
    return "" if combined([mine, best], [1.0, -1.0]).excludes_zero else "tied"
