"""The common part of the programs that simulate promises: their arguments, their limit, and the head of their pages."""

from __future__ import annotations

import argparse
import datetime
import platform
from pathlib import Path

WITHIN = 0.106
"""The share of broken promises that passes in 10,000 repetitions, for delta = 0.1."""


def arguments(description: str | None) -> argparse.Namespace:
    """`repetitions` a cell, `workers`, and the `page` to write, None for no page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path)
    return parser.parse_args()


def when_and_where() -> str:
    """The day and the machine."""
    return f"{datetime.datetime.now(datetime.UTC).date()}, {platform.processor() or platform.machine()}"
