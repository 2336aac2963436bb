"""The benchmarks' shared command line: options, a check of the output, and figures kept as they come."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapes import SHAPES

from semgrad_guard.files import atomic_write
from semgrad_guard.questions.data_files import require_writable


def parser(
    description: str | None, *, rounds: str, output: str = "where the figures go (JSON)"
) -> argparse.ArgumentParser:
    """The options that each of them has; `rounds` and `output` are the help texts of two."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=sorted(SHAPES), default="0.5B")
    made.add_argument("--rounds", type=int, default=5, help=f"{rounds} (5)")
    made.add_argument("--output", type=Path, help=output)
    return made


def parsed(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; refused before anything is measured where the figures could not be written."""
    arguments = options.parse_args()
    if arguments.output:
        require_writable(arguments.output)
    return arguments


def keep(report: Mapping[str, Any], output: Path | None) -> None:
    """Write the figures so far, if they are wanted."""
    if output:
        atomic_write(output, json.dumps(report, indent=1))
