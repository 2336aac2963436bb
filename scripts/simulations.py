"""The common part of the programs that simulate promises: their arguments and limit, their cells, and their pages."""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

WITHIN = 0.106
"""The share of broken promises that passes in 10,000 repetitions, for delta = 0.1."""


def arguments(description: str | None) -> argparse.Namespace:
    """`repetitions` a cell, `workers`, and the `page` to write, None for no page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path)
    return parser.parse_args()


def simulated_all(
    simulated: Callable[..., Any], cases: Iterable[tuple[Any, ...]], repetitions: int, *, workers: int
) -> list[Any]:
    """The outcomes of a function of a case's parts and the repetitions; each is shown as soon as it is known."""
    found: list[Any] = []
    with ProcessPoolExecutor(workers) as pool:
        for outcome in pool.map(simulated, *zip(*((*case, repetitions) for case in cases), strict=True)):
            found.append(outcome)
            print(f"{len(found)}: {outcome}", flush=True)
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A table of Markdown, and an empty line."""
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *rows]
    return [*(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def finished(page: Path | None, lines: Iterable[str], *, kept: bool) -> int:
    """Show the page and write it: the status to exit with."""
    text = "\n".join(lines)
    print(text)
    if page is not None:
        page.write_text(text, encoding="utf-8")
    return int(not kept)


def when_and_where() -> str:
    """The day and the machine."""
    return f"{datetime.datetime.now(datetime.UTC).date()}, {platform.processor() or platform.machine()}"
