"""How much of a score's peak memory is tensors, how much the C library's heap, and the cost of a stricter heap.

    python benchmarks/heap.py [--only 60/128]

glibc takes large buffers straight from the system and gives them back, but raises its idea of "large" to 32 MiB as it
sees them; what is smaller then comes from a heap in which freed pieces lie between living ones. An environment with
MALLOC_MMAP_THRESHOLD_=131072 fixes that idea from the start. Processes with and without it take turns; peaks are those
of a forked child, times the least CPU seconds of three in each process. Linux with glibc only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import command
import torch
from machine import about, best, spread
from peak_memory import live_tensors, peak_above_start
from shapes import USUAL, build
from tables import ranged, table
from ways import Bench

STRICT = {"MALLOC_MMAP_THRESHOLD_": "131072"}
WAYS = ("written", "frugal")
HEADER = ("scoring", "tensors, MB", "peak, MB", "strict peak, MB", "strict time over usual")
Figures = dict[str, dict[str, float]]


def measure(shape: str, cell: str) -> Figures:
    """By way: MB of tensors and of the process at their peaks above what it held before, and CPU seconds."""
    torch.set_num_threads(1)
    bench = Bench(build(shape, torch.float32), next(s for s in USUAL if str(s) == cell))
    found: Figures = {}
    for way in WAYS:
        work: Callable[[], object] = getattr(bench, way)
        peak = peak_above_start(work, prepare=bench.capturing)
        found[way] = {"peak": peak, "seconds": best(work, rounds=3), "tensors": live_tensors(work)}
    return found


def elsewhere(shape: str, cell: str, environment: dict[str, str]) -> Figures:
    """The same in a process of its own, with these variables in its environment."""
    call = [sys.executable, __file__, "--shape", shape, "--only", cell, "--worker"]
    done = subprocess.run(call, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = command.parser(__doc__, rounds="how often each heap takes its turn")
    options.set_defaults(rounds=3)
    options.add_argument("--only", choices=[str(s) for s in USUAL], default="60/128", help="the cell (60/128)")
    options.add_argument("--worker", action="store_true", help="measure in this process, print JSON")
    arguments = command.parsed(options)
    if arguments.worker:
        print(json.dumps(measure(arguments.shape, arguments.only)))
        return
    cell, rounds = (arguments.shape, arguments.only), list[tuple[Figures, Figures]]()
    for number in range(arguments.rounds):
        rounds.append((elsewhere(*cell, {}), elsewhere(*cell, STRICT)))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    report: dict[str, Any] = {"shape": arguments.shape, "setting": arguments.only, "machine": about(), "rounds": rounds}
    print("\n".join(table(HEADER, [row(way, rounds) for way in WAYS])))
    command.keep(report, arguments.output)


def row(way: str, rounds: list[tuple[Figures, Figures]]) -> tuple[str, ...]:
    """One way's line of the table, in the header's order."""
    tensors = statistics.median(usual[way]["tensors"] for usual, _ in rounds)
    peaks = [ranged(spread([both[heap][way]["peak"] for both in rounds]), digits=0) for heap in (0, 1)]
    times = [strict[way]["seconds"] / usual[way]["seconds"] for usual, strict in rounds]
    return way, f"{tensors:.0f}", *peaks, ranged(spread(times), digits=2)


if __name__ == "__main__":
    main()
