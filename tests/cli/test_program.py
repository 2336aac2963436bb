"""The program itself: help worth reading, a version, the demo's door; and what options take: each once, "-" where it
means something, numbers that make sense, devices that hold a model.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.main import get_command

import semgrad_guard
from semgrad_guard.cli import app, loading, options, short_commands
from semgrad_guard.estimators import ESTIMATORS, FusedStates
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.grading import GRADERS

from .helpers import ASKED, Run, flat, jsonl

PROGRAM: Any = get_command(app)


def test_the_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"semgrad-guard {semgrad_guard.__version__}\n")


def choices(kind: Any) -> list[str]:
    return [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", PROGRAM.commands)
def test_a_page_of_help(run: Run, monkeypatch: pytest.MonkeyPatch, command: str, width: int) -> None:
    """It fits, has its parts, and names the words of each choice and its default."""
    monkeypatch.setenv("COLUMNS", str(width))
    page = run(command, "--help").stdout
    assert max(map(len, page.splitlines())) <= width
    for part in (f"Examples semgrad-guard {command}", "Exit codes 0 ", *("--quiet", "--verbose", "--help")):
        assert part in flat(page.partition("─ What is shown ─")[2])
    assert "─ Options ─" not in page, "each option has its group"
    for option in (option for name, option in OPTIONS if name == command):
        if words := choices(option.type_descriptor.annotation):
            default = "Default: " if option.default is None else f"[default: {option.default}]"
            assert default in (option.help if option.default is None else flat(page)), option.name
            assert all(word in flat(page) for word in words), option.name


def test_the_programs_help_says_what_holds_for_each_command(run: Run) -> None:
    page = run("--help").stdout
    assert max(map(len, page.splitlines())) <= 80
    resumed = "calibrate, evaluate, gate and probe resume where they stopped"
    for part in ("ask ", "score ", "demo ", "Exit codes 0 done", "3 ask: abstained", "130 interrupted", resumed):
        assert part in flat(page)
    assert sum(bool(choices(option.type_descriptor.annotation)) for _, option in OPTIONS) > 10
    assert "CSV or Parquet" in flat(run("evaluate", "--help").stdout)  # as calibrate and score
    assert "exit code 6" not in flat(run("serve", "--help").stdout)  # a server has none for each answer


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


OPTIONS = [
    (name, option)
    for name, command in PROGRAM.commands.items()
    for option in command.params
    if option.param_type_name == "option" and not option.is_eager
]
SINGLE = [(name, option) for name, option in OPTIONS if not option.multiple]


@pytest.mark.parametrize(("command", "option"), SINGLE, ids=[f"{name} {o.opts[0]}" for name, o in SINGLE])
def test_an_option_is_given_once(run: Run, tmp_path: Path, command: str, option: Any) -> None:
    spelled, again = option.opts[0], option.opts[-1]
    value = () if option.is_flag else ("1",)
    question = ("What?",) if command == "ask" else ()
    result = run(command, *question, spelled, *value, again, *value)
    assert result.exit_code == 2
    assert f"{option.opts[0]}" in flat(result.stderr)
    assert "is given 2 times; give it once" in flat(result.stderr)


def test_methods_are_those_that_an_evaluation_has() -> None:
    assert {estimator.name for estimator in (*paper_suite(), FusedStates())} == set(options.METHOD_NAMES)


MOST = {"calibrate": 24, "evaluate": 22, "serve": 25, "ask": 14, "score": 16}
"""How many options a command may have, help apart."""
ROOT = Path(__file__).parents[2]


def test_every_option_is_in_a_page_and_in_a_test() -> None:
    """An option that no page names has no user, and one that no test gives may do anything."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    files = [*(ROOT / "tests").rglob("*.py"), Path(__file__).with_name("refused.txt")]
    tests = "\n".join(path.read_text(encoding="utf-8") for path in files)
    spelled = {option.opts[0] for _, option in OPTIONS}
    assert [name for name in sorted(spelled) if not re.search(rf"{name}(?![\w-])", pages)] == []
    assert [name for name in sorted(spelled) if not re.search(rf"[\"' ]{name}[\"'= ]", tests)] == []
    counts = Counter(name for name, _ in OPTIONS)
    assert {name: counts[name] for name in MOST if counts[name] > MOST[name]} == {}


@pytest.mark.parametrize("by", [(), ("--by", "sentence")])
def test_a_file_is_written_beside_stdout(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...]
) -> None:
    data = jsonl(tmp_path / "r.jsonl", ({"question": q, "response": "This."} for q in ASKED[:2]))
    monkeypatch.chdir(tmp_path)
    shown = run("score", "--model", model_folder, "--data", data, *by, "--json", "--output", "./-").stdout
    assert [json.loads(line)["question"] for line in shown.splitlines()] == ASKED[:2]
    assert (tmp_path / "-").read_text() == shown
