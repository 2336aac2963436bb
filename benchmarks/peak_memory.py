"""The peak memory of one piece of work: of a forked child, which nothing before blurs, and of its tensors alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_above_start(work: Callable[[], object], *, prepare: Callable[[], object]) -> float:
    """MB that `work` held at most beyond what was resident when it began (after `prepare`, in the same child)."""
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


def live_tensors(work: Callable[[], object]) -> float:
    """MB of CPU tensors that `work` made and held at most at one time, as PyTorch's profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results = profiled.profiler and profiled.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"] if results else []
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore (missing from the stubs)
        most = max(most, held)
    return most / 2**20
