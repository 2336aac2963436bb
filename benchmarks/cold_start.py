"""How long one waits for nothing: imports and the first answer, each in a process of its own.

    python benchmarks/cold_start.py [--rounds 5]

Wall-clock seconds, median (least-greatest), next to `import torch` and `import torch, transformers`, which every
program that runs a model needs; the commands take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from machine import spread
from rich.console import Console
from rich.table import Table

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import torch, a transformers model": ["-c", "import torch; from transformers import LlamaForCausalLM"],
    "import semgrad_guard": ["-c", "import semgrad_guard"],
    "import semgrad_guard.calibration": ["-c", "import semgrad_guard.calibration"],
    "semgrad-guard --help": ["-m", "semgrad_guard.cli", "--help"],
    "semgrad-guard ask": ["-m", "semgrad_guard.cli", "ask", "What is the capital of France?"],
}


def seconds(arguments: list[str]) -> float:
    """One run's wall-clock time."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=False, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    table = Table("command", "seconds (least-greatest)")
    for name, values in taken.items():
        middle, low, high = spread(values)
        table.add_row(name, f"{middle:.2f} ({low:.2f}-{high:.2f})")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
