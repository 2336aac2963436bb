"""The figures' conditions, and this machine's best rates: reading memory, multiplying matrices."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class Rates:
    """The best this machine did in one thread: bytes read and floating-point operations per second of CPU time."""

    bytes_per_second: float
    flops_per_second: float


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


def measured_rates(dtype: torch.dtype) -> Rates:
    """Bandwidth from a matrix-vector product over 512 MiB, as a decode step does it; rate from a square product.

    A dtype without instructions of its own is emulated slowly, and can be converted instead: what float32 reaches
    bounds it from above. (Bandwidth always is float32's: bytes are bytes.)
    """
    weight, vector = torch.ones(32768, 4096), torch.ones(4096, 1)
    bandwidth = weight.nbytes / best(lambda: weight @ vector)
    squares = [torch.ones(2048, 2048, dtype=kind) for kind in {torch.float32, dtype}]
    return Rates(bandwidth, max(2 * 2048**3 / best(lambda square=square: square @ square) for square in squares))


def best(work: Callable[[], object], rounds: int = 5) -> float:
    """The least CPU seconds of several rounds: the machine's best, not its usual time."""
    return min(cpu_seconds(work) for _ in range(rounds))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process that one piece of work took."""
    start = time.process_time()
    work()
    return time.process_time() - start


def spread(values: list[float]) -> list[float]:
    """Median, least, greatest."""
    return [statistics.median(values), min(values), max(values)]
