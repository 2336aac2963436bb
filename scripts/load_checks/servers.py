"""`Server`: `semgrad-guard serve` as a process of its own, which is watched, ended and killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_LOUD = re.compile(r"Traceback|internal error")
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([-+.e\d]+)$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Server:
    """A running server. `output` is the file of its standard output and error."""

    url: str
    process: subprocess.Popen[str]
    output: Path

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def metrics(self) -> Mapping[str, float]:
        """Its metrics by name; those of several labels are added up."""
        found: dict[str, float] = {}
        text = httpx.get(f"{self.url.removesuffix('/v1')}/metrics", timeout=60).text
        for name, value in _METRIC.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(60)

    def end(self) -> int:
        """End it (SIGTERM), and return its status."""
        self.process.terminate()
        return self.process.wait(120)

    def loud(self) -> list[str]:
        """Lines of its log that name a bug."""
        return [line for line in self.output.read_text(errors="replace").splitlines() if _LOUD.search(line)]


@contextmanager
def serving(folder: Path, *options: object, log: Path | None = None, **settings: Any) -> Generator[Server]:
    """A server that keeps its log in a folder, and runs as long as this lasts; one thread computes. `settings` are
    those of a file.

    Raises:
        SystemExit: it does not start.
    """
    command = [
        sys.executable,
        "-m",
        "semgrad_guard.cli",
        "serve",
        "--port",
        "0",
        "--log",
        str(log or folder / "log.db"),
    ]
    if settings:
        (folder / "settings.json").write_text(json.dumps(settings))
        command += ["--settings", str(folder / "settings.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = folder / "said.txt"
    with (
        output.open("a") as errors,
        subprocess.Popen(  # noqa: S603
            [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        lines = process.stdout
        line = lines.readline() if lines is not None else ""
        if lines is None or " at http" not in line:
            raise SystemExit(f"the server did not start: {line!r} {output.read_text()[-2000:]}")
        threading.Thread(target=lambda: errors.writelines(lines), daemon=True).start()
        try:
            yield Server(line.rpartition(" ")[2].strip(), process, output)
        finally:
            if process.poll() is None:
                process.kill()
