"""Ratios that must not get worse: the committed ones, and the comparison of a new run with them.

The least of the rounds is compared, not the median: noise on a shared machine only ever adds time. Shares of generation
compare between processors of one kind only: the file holds a report for each kind that was measured. Elsewhere it says
nothing, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 1.35
MEMORY_TOLERANCE_MB = 40


def worsened(report: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ratios that are worse than recorded on a machine of this kind, one line each."""
    machines = {_kind(report): report for report in recorded}
    if _kind(report) not in machines:
        return [f"not comparable: recorded on {', '.join(sorted(machines))}; this is {_kind(report)}"]
    known = {(row["dtype"], row["setting"]): row for row in machines[_kind(report)]["rows"]}
    complaints: list[str] = []
    for row in report["rows"]:
        before = known.get((row["dtype"], row["setting"]))
        if before is not None:
            complaints += _worse(row, before)
    return complaints


def _kind(report: Mapping[str, Any]) -> str:
    return f"{report['machine']['cpu']} ({report['machine']['capability']})"


def _worse(row: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    where = f"{row['dtype']} {row['setting']}"
    found: list[str] = []
    for way in ("capturing", "written", "read"):
        new, old = row["share_of_plain"][way][1], before["share_of_plain"][way][1]
        if new > TOLERANCE * old:
            found.append(f"{where}: {way} takes {new:.3f} of plain generation at best, recorded {old:.3f}")
    new, old = row["peak_mb"]["written"], before["peak_mb"]["written"]
    if new > old + MEMORY_TOLERANCE_MB:
        found.append(f"{where}: scoring holds {new:.0f} MB at its peak, recorded {old:.0f}")
    return found
