"""`semgrad-guard`, holding itself: `python held_program.py RECORD LINES ARGUMENTS...`.

Once the record of answers has so many lines, the program touches RECORD.held and waits before its next batch until a
signal ends it, so that the result of a test does not depend on the speed of the run. A hook on the model would change
the model's fingerprint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from semgrad_guard import LanguageModel
from semgrad_guard.cli import app
from tests.steps import until

if __name__ == "__main__":
    record, lines = Path(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    generate_batch = LanguageModel.generate_batch

    def held(*given: Any, **named: Any) -> Any:
        if record.exists() and record.read_bytes().count(b"\n") >= lines:
            record.with_suffix(".held").touch()
            until(lambda: False)
        return generate_batch(*given, **named)

    LanguageModel.generate_batch = held
    app()
