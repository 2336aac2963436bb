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


def test_the_lower_bound_is_read_off() -> None:
    found = SCRIPT["lowest"](["torch>=2.13", "numpy>=2.0", "langchain-core[x]>=1.7,<2"], but=("torch",))
    assert list(found) == ["numpy==2.0", "langchain-core==1.7"]


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy>=2; python_version < '3.12'"])
def test_a_requirement_without_a_readable_bound_is_named(requirement: str) -> None:
    with pytest.raises(SystemExit, match="no lower bound"):
        list(SCRIPT["lowest"]([requirement], but=()))
