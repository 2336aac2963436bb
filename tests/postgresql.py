"""A PostgreSQL server of a test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .ports import free_port

PLACES = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])

WAITING = ("-w", "-t", "200")
"""It gives up after a minute by default, which a busy machine may take."""


def require_postgresql() -> None:
    """Skip where there is no server to start."""
    if os.name != "posix" or shutil.which("initdb", path=PLACES) is None:
        pytest.skip("there is no PostgreSQL server (initdb) on this machine")


class Postgres:
    """A server in a folder of its own, which listens at a free port of this machine."""

    def __init__(self) -> None:
        self._folder, root = Path(tempfile.mkdtemp(prefix="postgres-")), hasattr(os, "geteuid") and os.geteuid() == 0
        self._user: dict[str, Any] = {"user": "postgres"} if root else {}  # it refuses to run as root
        if root:  # not in pytest's folders: each run of pytest closes them to others
            shutil.chown(self._folder, "postgres")
        self.port = free_port()
        self.url = f"postgresql+psycopg://tester@127.0.0.1:{self.port}/postgres"
        self._run("initdb", "-D", str(self._folder / "data"), "-U", "tester", "-A", "trust", "--no-sync")
        self.start()

    def start(self) -> None:
        """Come back."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._run(
            "pg_ctl", "-D", str(self._folder / "data"), "-o", options, "-l", str(self._folder / "l"), *WAITING, "start"
        )

    def stop(self) -> None:
        """Go away."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", *WAITING, "stop")

    def remove(self) -> None:
        """Go away for good."""
        self.stop()
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=PLACES)
        assert found is not None
        output = self._folder / "output"  # a pipe would stay open as long as the server
        with output.open("w") as file:
            ended = subprocess.run([found, *arguments], cwd="/", stdout=file, stderr=file, timeout=240, **self._user)
        assert ended.returncode == 0, output.read_text()
