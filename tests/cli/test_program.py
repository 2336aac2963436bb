"""The program itself: help worth reading, a quick start, a version, and the demo's door."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from typer.main import get_command

import semgrad_guard
from semgrad_guard.cli import app, loading, options, short_commands
from semgrad_guard.estimators import ESTIMATORS
from semgrad_guard.grading import GRADERS

from .helpers import flat

Run = Callable[..., Result]
PROGRAM: Any = get_command(app)


def test_the_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"semgrad-guard {semgrad_guard.__version__}\n")


def test_the_programs_help_lists_commands_and_exit_codes(run: Run) -> None:
    shown = flat(run("--help").stdout)
    for word in ("ask ", "score ", "calibrate ", "demo ", "Exit codes 0 done", "3 ask: abstained", "130 interrupted"):
        assert word in shown


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_every_command_has_examples_and_exit_codes(run: Run, command: str) -> None:
    shown = flat(run(command, "--help").stdout)
    assert f"Examples semgrad-guard {command}" in shown
    assert "Exit codes 0 " in shown


def test_help_says_what_holds_for_each_command(run: Run) -> None:
    assert "calibrate, evaluate, gate and probe resume where they stopped" in flat(run("--help").stdout)
    assert "CSV or Parquet" in flat(run("evaluate", "--help").stdout)  # as calibrate and score
    assert "exit code 6" not in flat(run("serve", "--help").stdout)  # a server has none for each answer


def test_help_fits_eighty_columns(run: Run) -> None:
    for command in ((), *((name,) for name in PROGRAM.commands)):
        assert max(map(len, run(*command, "--help").stdout.splitlines())) <= 80


def test_choices_are_those_that_exist() -> None:
    assert tuple(estimator.name for estimator in ESTIMATORS) == options.ESTIMATOR_NAMES
    assert tuple(GRADERS) == options.GRADER_NAMES


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "scipy", "matplotlib"}
    code = (
        "import sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from semgrad_guard.cli import app\n"
        "try: app(['calibrate', '--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_an_interrupt_ends_any_command_with_its_own_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", interrupt)
    result = run("ask", "q")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted. Nothing is kept.\n")


def fake_demo(monkeypatch: pytest.MonkeyPatch, run: Callable[..., int]) -> None:
    module = ModuleType("langchain_semgrad_guard.demo")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "langchain_semgrad_guard", ModuleType("langchain_semgrad_guard"))
    monkeypatch.setitem(sys.modules, "langchain_semgrad_guard.demo", module)


def test_the_demo_gets_its_folder_and_gives_its_code(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Path | None, str]] = []
    fake_demo(monkeypatch, lambda output, *, model: seen.append((output, model)) or 7)
    assert run("demo", "--output", tmp_path, "--model", "pocket").exit_code == 7
    assert run("demo").exit_code == 7
    assert seen == [(tmp_path, "pocket"), (None, "pocket")]


def test_all_that_is_missing_is_named_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"matplotlib", "bm25s", "sklearn"}
    monkeypatch.setattr(short_commands, "find_spec", lambda name: None if name in absent else name)
    result = run("demo")
    assert result.exit_code == 1
    shown = flat(result.stderr)
    assert "scikit-learn, matplotlib, bm25s are not installed. Run: pip install 'semgrad-guard[demo]'" in shown


def test_the_demo_asks_for_what_its_extra_brings() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    brought = [package for name in ("demo", "langchain", "grammar", "eval") for package in extras[name]]
    names = {re.split(r"[<>=\[]", package)[0] for package in brought} - {"semgrad-guard"}
    assert set(short_commands._NEEDED.values()) == names
