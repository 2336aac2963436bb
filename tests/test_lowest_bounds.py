"""`make check-lowest` installs the stated versions: each dependency at its lower bound, torch as in constraints.txt."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "lowest_bounds.py"))


def test_every_dependency_is_pinned_once(capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT["main"]()
    pins = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [requirement for group in groups for requirement in group]
    names = {requirement.split(">=")[0].partition("[")[0] for requirement in wanted if ">=" in requirement}
    assert sorted(pin.split("==")[0] for pin in pins) == sorted(names)
    assert "torch==2.13.0" in pins
