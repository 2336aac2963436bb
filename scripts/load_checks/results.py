"""`Check`: a property, whether it holds, and its figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that must hold. `problems` are the first counterexamples, in words."""

    name: str
    figures: Mapping[str, Any]
    problems: Sequence[str] = ()

    @property
    def line(self) -> str:
        """The check in one line."""
        listed = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"{'FAILED' if self.problems else 'passed'}  {self.name}: {listed}"


def report(checks: Sequence[Check], path: Path) -> bool:
    """Print the checks and write them to a file of JSON; whether all of them hold."""
    for check in checks:
        print(check.line)
        for problem in check.problems[:5]:
            print(f"        {problem}")
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    found = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**machine, "load": os.getloadavg()},
        "checks": [{**asdict(check), "passed": not check.problems} for check in checks],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return not any(check.problems for check in checks)
