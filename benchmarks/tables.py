"""The benchmark's figures as rows and as a page's table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

HEADER = (
    "dtype",
    "prompt/answer",
    "generation, s",
    "with capture",
    "scoring",
    "decode steps",
    "over floor",
    "scoring, read",
    "scoring, frugal",
    "official",
    "official/ours",
    "kept MB",
    "peak MB",
    "frugal peak MB",
    "official peak MB",
)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table, as text."""
    shares, memory = row["share_of_plain"], row["peak_mb"]
    return (
        row["dtype"],
        row["setting"],
        f"{statistics.median(row['seconds']['plain']):.2f}",
        ranged(shares["capturing"]),
        ranged(shares["written"]),
        ranged(row.get("decode_steps"), digits=1),
        ranged(row.get("over_floor"), digits=2),
        ranged(shares["read"]),
        ranged(shares.get("frugal")),
        ranged(shares.get("naive")),
        f"{row['naive_over_written'][0]:.1f}" if "naive_over_written" in row else "left out",
        f"{memory['kept']:.0f}",
        f"{memory['written']:.0f}",
        f"{memory['frugal']:.0f}" if "frugal" in memory else "",
        f"{memory['naive']:.0f}" if "naive" in memory else "",
    )


def ranged(values: Sequence[float] | None, *, digits: int = 3) -> str:
    """Median (least-greatest)."""
    if values is None:
        return ""
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a page of the documentation, and the cells without the official algorithm by name."""
    left_out = [
        f"- {row['dtype']} {row['setting']}: {row['without_official']}"
        for row in report["rows"]
        if row["without_official"]
    ]
    lines = [machine_line(report), "", *table(HEADER, [cells(row) for row in report["rows"]]), "", *left_out]
    return "\n".join(lines) + "\n"


def machine_line(report: Mapping[str, Any]) -> str:
    """The measurement, its machine and its time."""
    machine = report["machine"]
    return (
        f"{report['shape']} shape, random weights; {machine['cpu']} ({machine['capability']}), "
        f"{report['device'] if report['device'] == 'cpu' else machine['gpu']}, "
        f"{machine['threads']} thread, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"{machine['date']}. Shares of plain greedy generation: median (least-greatest) of interleaved rounds."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
