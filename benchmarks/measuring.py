"""What the benchmarks share: clocks and peaks, the conditions of a figure, tables, and figures kept as they come."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the option that each benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="where the figures go (JSON)")
    return made


def parsed(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; the folder of the figures is there before anything is measured."""
    arguments = options.parse_args()
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def keep(report: Mapping[str, Any], output: Path | None) -> None:
    """Write the figures so far, if they are wanted."""
    if output:
        output.write_text(json.dumps(report, indent=1))


def about() -> dict[str, Any]:
    """Processor, GPU, versions, threads, load and date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process that one piece of work took: a busy machine does not blur them."""
    start = time.process_time()
    work()
    return time.process_time() - start


def gpu_seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds until the device has done everything."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_above_start(work: Callable[[], object], *, prepare: Callable[[], object]) -> float:
    """MB that `work` held at most beyond what was resident when it began (after `prepare`), both in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            before = _status("VmRSS")
            work()
            os.write(writer, str((_status("VmHWM") - before) / 1024).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return float(answer or "nan")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def over(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios, round by round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, greatest."""
    return [statistics.median(values), min(values), max(values)]


def ranged(values: Sequence[float] | None, *, digits: int = 3) -> str:
    """Median (least-greatest)."""
    if values is None:
        return ""
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))
