"""The peak memory of one piece of work, taken in a forked child so that nothing before or after blurs it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path


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
