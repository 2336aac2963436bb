"""Draw what a command shows in a terminal, as SVG.

python benchmarks/terminal_pictures.py docs/pictures/ask-sentences.svg ask QUESTION --calibration FILE ...
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

os.environ["COLUMNS"] = "88"

from semgrad_guard.cli import app
from semgrad_guard.cli.terminal import OUT


def main() -> None:
    target, arguments = Path(sys.argv[1]), sys.argv[2:]
    OUT.record = True
    app(arguments, standalone_mode=False)
    shown = shlex.join(["semgrad-guard", arguments[0], *(one for one in arguments[1:] if one.startswith("--by"))])
    OUT.save_svg(str(target), title=shown)


if __name__ == "__main__":
    main()
