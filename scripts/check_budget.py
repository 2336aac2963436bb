"""Compare every folder with its budget in `scripts/budget.toml`: lines of Python, words of pages.

    python scripts/check_budget.py [--lower]    # --lower writes today's figures where they are below their budgets

The tree only shrinks: a folder above its budget fails, and so does one far below it, whose budget is then lowered. A
little room below is left to branches that merge at the same time.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "scripts/budget.toml"
SUFFIX = {"lines": ".py", "words": ".md"}


def room_of(path: Path, budgets: Mapping[str, list[int]]) -> str | None:
    """The key of a file: its folder's own files (`folder/*.py`), or else the nearest folder around it."""
    names = (f"{path.parent.as_posix()}/*{path.suffix}", *(parent.as_posix() for parent in path.parents))
    return next((name for name in names if name in budgets), None)


def measured(root: Path, unit: str, budgets: Mapping[str, list[int]]) -> tuple[dict[str, int], set[str]]:
    """Each key's figure, and the folders with Python that have no budget. Files that git ignores do not count."""
    listing = ("git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", f"*{SUFFIX[unit]}")
    found = subprocess.run(listing, check=True, capture_output=True, encoding="utf-8").stdout.splitlines()
    figures, strangers = dict.fromkeys(budgets, 0), set[str]()
    for path in (Path(name) for name in found if (root / name).exists()):
        if room := room_of(path, budgets):
            text = (root / path).read_text(encoding="utf-8")
            figures[room] += len(text.splitlines() if unit == "lines" else text.split())
        elif unit == "lines":
            strangers.add(path.parent.as_posix())
    return figures, strangers


def complaint(room: str, figure: int, budget: int, unit: str) -> str | None:
    """What to do about a folder, if there is something to do."""
    if figure > budget:
        return f"{room}: take out {figure - budget:,} {unit}; moved ones bring their budget from the folder they left"
    if figure < budget * 0.99 - 25:
        return f"{room}: lower the budget to {figure} (python scripts/check_budget.py --lower)"
    return None


def main(arguments: list[str], *, root: Path = ROOT) -> int:
    file = root / TABLE
    text, complaints = file.read_text(encoding="utf-8"), list[str]()
    for unit, budgets in tomllib.loads(text).items():
        figures, strangers = measured(root, unit, budgets)
        print(f"{unit:<40} {'now':>8} {'budget':>8} {'aim':>8}")
        for room, (budget, aim) in budgets.items():
            figure = figures[room]
            if "--lower" in arguments and figure < budget:
                text = text.replace(f'"{room}" = [{budget},', f'"{room}" = [{figure},')
                budget = figure
            print(f"  {room:<38} {figure:>8,} {budget:>8,} {aim:>8,}")
            complaints += filter(None, [complaint(room, figure, budget, unit)])
        complaints += [f"{folder}: give it a budget in {TABLE}" for folder in sorted(strangers)]
    if "--lower" in arguments:
        file.write_text(text, encoding="utf-8")
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
