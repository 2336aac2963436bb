"""`semgrad-guard serve` as a process of its own, for the checks that observe it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([-+.e\d]+)$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Server:
    """A running server; `output` is the file of its standard error."""

    url: str
    process: subprocess.Popen[str]
    output: Path

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def metric(self, name: str) -> float:
        """One of its metrics; those of several labels are added up."""
        text = httpx.get(f"{self.url.removesuffix('/v1')}/metrics", timeout=60).text
        return sum(float(value) for found, value in _METRIC.findall(text) if found == name)

    def end(self) -> None:
        """End it (SIGTERM). It has to end with 0, and to have logged no bug.

        Raises:
            AssertionError: it does not.
        """
        self.process.terminate()
        assert self.process.wait(120) == 0, self.output.read_text()[-2000:]
        assert not re.search(r"Traceback|internal error", self.output.read_text()), self.output.read_text()[-2000:]


@contextmanager
def serving(folder: Path, *options: object, key: str = "") -> Generator[Server]:
    """A server that keeps its log in a folder, and runs as long as this lasts; one thread computes.

    Raises:
        SystemExit: it does not start.
    """
    command = [sys.executable, "-m", "semgrad_guard.cli", "serve", "--port", "0", "--log", str(folder / "log.db")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEMGRAD_GUARD_API_KEY": key}
    output = folder / "output.txt"
    with (
        output.open("a") as errors,
        subprocess.Popen(
            [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        lines, line = process.stdout, process.stdout.readline()
        if " at http" not in line:
            raise SystemExit(f"the server did not start: {line!r} {output.read_text()[-2000:]}")
        threading.Thread(target=lambda: errors.writelines(lines), daemon=True).start()
        server = Server(line.rpartition(" ")[2].strip(), process, output)
        try:
            yield server
            if process.poll() is None:
                server.end()
        finally:
            if process.poll() is None:
                process.kill()
