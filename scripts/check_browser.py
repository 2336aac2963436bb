"""Starts `semgrad-guard serve` (calibrated, letting nothing through, with a key), and drives its pages in Chromium.

python scripts/check_browser.py --browser .venv-browser/bin/python [--require] [--pictures output/browser]
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from check_server import server

PAGES = Path(__file__).parent / "browser_pages"
SERVERS = {"OPEN": (False, ()), "STRICT": (False, ("--threshold", "0")), "KEYED": (True, ())}
"""Whether a key is needed, and the options."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", required=True, help="the Python of the browser's environment")
    parser.add_argument("--require", action="store_true", help="a skipped test is a failure")
    parser.add_argument("--pictures", type=Path, default=Path("output/browser"), help="where screenshots are put")
    options, rest = parser.parse_known_args()
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for name, (has_key, given) in SERVERS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            environment[f"SEMGRAD_GUARD_TEST_{name}"] = stack.enter_context(
                server(folder, key if has_key else "", *given)
            )
        environment["SEMGRAD_GUARD_TEST_KEY"] = key
        environment["SEMGRAD_GUARD_TEST_PICTURES"] = str(options.pictures.resolve())
        command = [options.browser, "-m", "pytest", "-c", str(PAGES / "pytest.ini"), str(PAGES), *rest]
        more = ["--require"] if options.require else []
        found = subprocess.run([*command, *more], env=environment, check=False)  # noqa: S603
    raise SystemExit(found.returncode)


if __name__ == "__main__":
    main()
