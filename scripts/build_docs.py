"""Builds the documentation site in strict mode into `output/site`: `make docs`.

Strict means: a warning is an error. Warnings are given for links to pages and headings that do not exist, for pages
that are missing in the navigation, and for names in the reference that cannot be found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """The exit status of mkdocs."""
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
    }  # an announcement of the theme's makers, no warning of ours
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
