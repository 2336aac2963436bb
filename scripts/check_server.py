"""Starts `semgrad-guard serve` (calibrated, live, letting nothing through), and has real clients talk to it.

python scripts/check_server.py --clients .venv-clients/bin/python --openai-3 .venv-openai-3/bin/python [--require]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

CLIENTS = Path(__file__).parent / "server_clients"


@contextmanager
def server(folder: Path, key: str, *options: str, **settings: bool | str) -> Generator[str]:
    """The URL of a server that runs as long as this lasts; `settings` are those of a file."""
    command = [sys.executable, "-m", "semgrad_guard.cli", "serve", "--port", "0", "--log", str(folder / "log.db")]
    if settings:
        (folder / "settings.json").write_text(json.dumps(settings))
        command += ["--settings", str(folder / "settings.json")]
    environment = {**os.environ, "SEMGRAD_GUARD_API_KEY": key}
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: S603
        line = process.stdout.readline() if process.stdout else ""
        if " at http" not in line:
            raise SystemExit(f"the server did not start: {line!r}")
        try:
            yield line.rpartition(" ")[2].strip()
        finally:
            process.terminate()
            if process.wait(60) != 0:
                raise SystemExit(f"the server ended with {process.returncode}, and not with 0")


def pytest(python: str, arguments: Sequence[str | Path], environment: Mapping[str, str]) -> int:
    """The status of the tests in one environment."""
    command = [python, "-m", "pytest", "-c", CLIENTS / "pytest.ini", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", required=True, help="the Python of the clients' environment")
    parser.add_argument("--openai-3", required=True, help="the Python of an environment with openai 3")
    parser.add_argument("--require", action="store_true", help="a skipped client is a failure")
    options, rest = parser.parse_known_args()
    key = secrets.token_hex(16)
    servers = {"URL": (), "LIVE_URL": ("--mode", "annotate", "--threshold", "0"), "STRICT_URL": ("--threshold", "0")}
    with ExitStack() as stack:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for name, given in servers.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            environment[f"SEMGRAD_GUARD_TEST_{name}"] = stack.enter_context(server(Path(folder), key, *given))
        environment["SEMGRAD_GUARD_TEST_KEY"] = key
        given = [*(["--require"] if options.require else []), *rest]
        new = CLIENTS / "test_frameworks_of_openai_3.py"
        tests = [(options.clients, [CLIENTS, f"--ignore={new}"]), (options.openai_3, [CLIENTS / "test_openai.py", new])]
        failed = [python for python, which in tests if pytest(python, [*which, *given], environment) != 0]
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
