"""Ratios that must not get worse: the committed ones, and what a new run says of them.

The least of the rounds is compared, not the median: noise on a shared machine only ever adds time. Shares of generation
compare between processors of one kind only; elsewhere the file says nothing, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLERANCE = 1.35
MEMORY_TOLERANCE_MB = 40


def worsened(report: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """What is worse than recorded, a line each; empty where nothing is."""
    here, there = report["machine"], recorded["machine"]
    if (here["cpu"], here["capability"]) != (there["cpu"], there["capability"]):
        return [f"not comparable: recorded on {there['cpu']} ({there['capability']}), this is {here['cpu']}"]
    known = {(row["dtype"], row["setting"]): row for row in recorded["rows"]}
    complaints: list[str] = []
    for row in report["rows"]:
        before = known.get((row["dtype"], row["setting"]))
        if before is not None:
            complaints += _worse(row, before)
    return complaints


def _worse(row: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    where = f"{row['dtype']} {row['setting']}"
    found: list[str] = []
    for way in ("capturing", "captured", "prefix"):
        new, old = row["share_of_plain"][way][1], before["share_of_plain"][way][1]
        if new > TOLERANCE * old:
            found.append(f"{where}: {way} takes {new:.3f} of plain generation at best, recorded {old:.3f}")
    new, old = row["peak_mb"]["captured"], before["peak_mb"]["captured"]
    if new > old + MEMORY_TOLERANCE_MB:
        found.append(f"{where}: scoring holds {new:.0f} MB at its peak, recorded {old:.0f}")
    return found
