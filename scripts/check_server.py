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
NEW = "openai_agents or pydantic_ai"
"""The clients that need openai 3, which others exclude."""
BOTH = "openai_chat or openai_responses or openai_completions or openai_reads or openai_parses"
"""The tests of openai itself."""


def pytest(python: str, arguments: Sequence[str | Path], environment: Mapping[str, str]) -> int:
    """The status of the tests in one environment."""
    command = [python, "-m", "pytest", "-c", CLIENTS / "pytest.ini", CLIENTS, *arguments]
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
        runs = [(options.clients, f"not ({NEW})"), (options.openai_3, f"{NEW} or {BOTH}")]
        failed = [python for python, names in runs if pytest(python, ["-k", names, *given], environment) != 0]
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
