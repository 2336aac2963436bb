"""The cost of a score: scoring as a share of plain greedy generation, against the official algorithm, and the floor.

    python benchmarks/scoring.py [--shape 0.5B] [--cells usual] [--dtype float32] [--output results.json]
    python benchmarks/scoring.py --compare benchmarks/recorded.json      (exit status 1 if a ratio has worsened)
    python benchmarks/scoring.py --frugal           (also the mode that holds least memory: its time and its peak)
    python benchmarks/scoring.py --cells full --output results.json --resume          (resume a run)

Models of known shapes with random weights, one thread. The ways below take turns within each round, in one process, so
that whatever else the machine does falls on all of them; times are CPU seconds of this process (wall-clock seconds with
synchronisation on a GPU), and every figure is a ratio taken round by round. A decode step is (generation - generation
of one token) / (answer - 1). Peak memory is that of a forked child above what it held when the scoring began.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import psutil
import torch
from floor import generation_floor, scoring_floor
from machine import Rates, about, cpu_seconds, measured_rates, spread
from peak_memory import peak_above_start
from recorded import worsened
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from shapes import FULL, QUICK, USUAL, Setting, build, leaves_naive_out
from tables import HEADER, cells, markdown
from ways import Bench

from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write

GENERATING = ("plain", "first_token", "capturing")
SCORING = ("written", "read", "frugal", "naive")
CELLS = {"quick": QUICK, "usual": USUAL, "full": FULL}


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    console = Console(width=220, stderr=True)
    report: dict[str, Any] = {"shape": arguments.shape, "device": arguments.device, "machine": about(), "rows": []}
    if arguments.resume and arguments.output.exists():
        report["rows"] = resumed(json.loads(arguments.output.read_text()), report)
        console.print(f"{len(report['rows'])} cells are taken from {arguments.output}; delete it to measure them anew.")
    for dtype in arguments.dtype or ["float32"]:
        known = {row["setting"] for row in report["rows"] if row["dtype"] == dtype}
        settings = [s for s in CELLS[arguments.cells] if arguments.only in (None, str(s)) and str(s) not in known]
        if settings:
            measure_all(settings, dtype, arguments, report, console)
    print(markdown(report))
    if arguments.output:
        atomic_write(arguments.output.with_suffix(".md"), markdown(report))
    if arguments.compare:
        complaints = worsened(report, json.loads(arguments.compare.read_text()))
        print("\n".join(complaints) or f"No ratio is worse than in {arguments.compare}.")
        sys.exit(bool(complaints))


def measure_all(
    settings: Sequence[Setting], dtype: str, arguments: argparse.Namespace, report: dict[str, Any], console: Console
) -> None:
    """Add the cells of one dtype to the report, and keep it after each."""
    with console.status(f"building the {arguments.shape} shape in {dtype} on {arguments.device}"):
        model = build(arguments.shape, getattr(torch, dtype), arguments.device)
        rates = measured_rates(model.dtype)
    expected = [generation_floor(model.config, setting, rates, model.dtype.itemsize) for setting in settings]
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(dtype, total=sum(expected))
        console.print(*HEADER, sep="  ")
        for setting, seconds in zip(settings, expected, strict=True):
            progress.update(task, description=f"{dtype}, {setting}")
            measured = measure(model, setting, rates, arguments.rounds, frugal=arguments.frugal)
            row = {"dtype": dtype, "date": about()["date"], **measured}
            report["rows"].append(row)
            command.keep(report, arguments.output)
            console.print(*cells(row), sep="  ")
            progress.advance(task, seconds)


def resumed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of a run that was stopped.

    Raises:
        InputError: it measured something else, or elsewhere.
    """
    conditions = [
        (report["shape"], report["device"], *(report["machine"][name] for name in ("cpu", "torch", "transformers")))
        for report in (before, now)
    ]
    if conditions[0] != conditions[1]:
        raise InputError(
            f"the figures so far are of {conditions[0]}, this run would be of {conditions[1]}: choose another --output"
        )
    return list(before["rows"])


def measure(model: Any, setting: Setting, rates: Rates, rounds: int, *, frugal: bool) -> dict[str, Any]:
    """One cell: seconds per way and round, ratios, the agreement with the official algorithm, peak memory."""
    bench, on_cpu = Bench(model, setting), model.device.type == "cpu"
    element = model.dtype.itemsize
    reason = leaves_naive_out(
        model.config,
        setting,
        element=element,
        flops_per_second=rates.flops_per_second if on_cpu else 1e14,
        free_bytes=free_bytes(model),
        rounds=rounds,
    )
    left_out = {"naive": reason is not None, "frugal": not frugal}
    scoring = tuple(way for way in SCORING if not left_out.get(way))
    seconds, results = take_turns(bench, (*GENERATING, *scoring), rounds)
    memory = {"kept": bench.kept_mb(), **{way: peak(bench, way) for way in scoring}}
    floor = scoring_floor(model.config, setting, rates, element).total if on_cpu else None
    return {
        "setting": str(setting),
        "without_official": reason,
        "seconds": seconds,
        "peak_mb": memory,
        "worst_relative_difference_to_naive": None if reason else difference(results["written"], results["naive"]),
        "worst_relative_difference_to_frugal": difference(results["written"], results["frugal"]) if frugal else None,
        "floor_seconds": floor,
        **ratios(seconds, setting, floor),
    }


def take_turns(bench: Bench, ways: tuple[str, ...], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Every way once a round."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    results: dict[str, Any] = {}
    clock = cpu_seconds if bench.model.device.type == "cpu" else gpu_seconds
    for _ in range(rounds):
        for way in ways:
            seconds[way].append(clock(lambda way=way: results.__setitem__(way, getattr(bench, way)())))
    return seconds, results


def ratios(seconds: Mapping[str, list[float]], setting: Setting, floor: float | None) -> dict[str, Any]:
    """Each way over plain generation; the official algorithm over ours; ours in decode steps and over the floor."""
    shares = {way: divided(values, seconds["plain"]) for way, values in seconds.items() if way != "plain"}
    found: dict[str, Any] = {"share_of_plain": {way: spread(values) for way, values in shares.items()}}
    if "naive" in seconds:
        found["naive_over_written"] = spread(divided(seconds["naive"], seconds["written"]))
    if setting.answer > 1:
        pairs = zip(seconds["plain"], seconds["first_token"], strict=True)
        steps = [(plain - first) / (setting.answer - 1) for plain, first in pairs]
        found["decode_steps"] = spread(divided(seconds["written"], steps))
    if floor is not None:
        found["over_floor"] = spread([value / floor for value in seconds["written"]])
    return found


def divided(above: list[float], below: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def difference(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float:
    """The worst relative difference."""
    found, expected = torch.tensor(ours), torch.tensor(theirs)
    return float(((found - expected) / expected).abs().max())


def peak(bench: Bench, way: str) -> float:
    """MB above what was held before."""
    work: Callable[[], Any] = getattr(bench, way)
    if bench.model.device.type == "cpu":
        return peak_above_start(work, prepare=bench.capturing)
    bench.capturing()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def gpu_seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds until the device has done everything."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def free_bytes(model: Any) -> int:
    """Memory left next to the model."""
    if model.device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info()[0])


def parsed() -> argparse.Namespace:
    options = command.parser(
        __doc__, rounds="rounds of each way", output="where the figures go (JSON; a table next to it)"
    )
    options.add_argument("--cells", choices=sorted(CELLS), default="usual", help="quick, usual (minutes) or full")
    names = sorted({str(setting) for cells in CELLS.values() for setting in cells})
    options.add_argument("--only", choices=names, metavar="CELL", help="only this cell, for example 60/8 or '60/32 x8'")
    options.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"], help="float32")
    options.add_argument("--device", default="cpu")
    options.add_argument("--frugal", action="store_true", help="also measure scoring with FRUGAL memory")
    options.add_argument("--resume", action="store_true", help="keep the cells that --output holds already")
    options.add_argument("--compare", type=Path, help="recorded ratios to hold the new ones against")
    arguments = command.parsed(options)
    if arguments.resume and not arguments.output:
        options.error("--resume continues the figures in --output, which is not given")
    if arguments.compare and not arguments.compare.exists():
        options.error(f"{arguments.compare} does not exist; a file that --output wrote here can be recorded as it")
    return arguments


if __name__ == "__main__":
    main()
