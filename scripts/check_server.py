"""Starts `semgrad-guard serve` (calibrated, live, letting nothing through), and has real clients talk to it.

python scripts/check_server.py --clients .venv-clients/bin/python --openai-3 .venv-openai-3/bin/python [--require]
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from serving import serving

CLIENTS = Path(__file__).parent / "server_clients"


def pytest(python: str, arguments: Sequence[str | Path], environment: Mapping[str, str]) -> int:
    """The status of the tests in one environment."""
    command = [python, "-m", "pytest", "-c", CLIENTS / "pytest.ini", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


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
            environment[f"SEMGRAD_GUARD_TEST_{name}"] = stack.enter_context(serving(Path(folder), *given, key=key)).url
        environment["SEMGRAD_GUARD_TEST_KEY"] = key
        given = [*(["--require"] if options.require else []), *rest]
        new = CLIENTS / "test_frameworks_of_openai_3.py"
        tests = [(options.clients, [CLIENTS, f"--ignore={new}"]), (options.openai_3, [CLIENTS / "test_openai.py", new])]
        failed = [python for python, which in tests if pytest(python, [*which, *given], environment) != 0]
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
