"""schemathesis sends `semgrad-guard serve` requests inside and outside its OpenAPI schema.

python scripts/check_fuzz.py --fuzzer .venv-fuzz/bin/python [--minutes 10]

It fails where a request is answered with a server's error, in another form than OpenAI's, or not within a minute, and
where the server logs a bug.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from serving import serving

HOOKS = Path(__file__).parent / "fuzzing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzzer", type=Path, required=True, help="the Python of the fuzzer's environment")
    parser.add_argument("--minutes", type=float, default=10)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name), "--threshold", "0.5", "--max-tokens", "8") as server,
    ):
        schema = f"{server.url.removesuffix('/v1')}/openapi.json"
        command = [given.fuzzer.parent / "st", "run", schema, "--max-time", round(60 * given.minutes)]
        command += ["--phases", "fuzzing", "--mode", "all", "--request-timeout", 60, "--continue-on-failure"]
        command += ["--checks", "not_a_server_error,error_form", "--workers", 2]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HOOKS), "MODEL": "pocket"}
        found = subprocess.run(list(map(str, command)), env=environment, check=False)
    return found.returncode


if __name__ == "__main__":
    raise SystemExit(main())
