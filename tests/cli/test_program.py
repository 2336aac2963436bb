"""The program itself: help worth reading, a version, the demo's door; what options take; what is printed; `plan`."""

from __future__ import annotations

import io
import json
import os
import platform
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
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import semgrad_guard
from semgrad_guard import cli
from semgrad_guard.calibration import plan
from semgrad_guard.cli import app, from_options, terminal
from semgrad_guard.cli.from_options import ESTIMATOR_NAMES, GRADER_NAMES, METHOD_NAMES
from semgrad_guard.estimators import ESTIMATORS, FusedStates
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.grading import GRADERS

from .helpers import ASKED, Run, flat, jsonl

PROGRAM: Any = get_command(app)


def test_the_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"semgrad-guard {semgrad_guard.__version__}\n")


def choices(option: Any) -> list[str]:
    if hasattr(option, "type"):  # an older typer's
        return list(getattr(option.type, "choices", ()))
    kind = option.type_descriptor.annotation
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
        if words := choices(option):
            default = "Default: " if option.default is None else f"[default: {option.default}]"
            assert default in (option.help if option.default is None else flat(page)), option.name
            assert all(word in flat(page) for word in words), option.name


def test_the_programs_help_says_what_holds_for_each_command(run: Run) -> None:
    page = run("--help").stdout
    assert max(map(len, page.splitlines())) <= 80
    resumed = "calibrate, evaluate, gate and probe resume where they stopped"
    for part in ("ask ", "score ", "demo ", "Exit codes 0 done", "3 ask: abstained", "130 interrupted", resumed):
        assert part in flat(page)
    assert sum(bool(choices(option)) for _, option in OPTIONS) > 10
    assert "CSV or Parquet" in flat(run("evaluate", "--help").stdout)  # as calibrate and score
    assert "exit code 6" not in flat(run("serve", "--help").stdout)  # a server has none for each answer


def test_choices_are_those_that_exist() -> None:
    assert tuple(estimator.name for estimator in ESTIMATORS) == ESTIMATOR_NAMES
    assert tuple(GRADERS) == GRADER_NAMES


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

    monkeypatch.setattr(from_options, "load", interrupt)
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
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in absent else name)
    result = run("demo")
    assert result.exit_code == 1
    shown = flat(result.stderr)
    assert "scikit-learn, matplotlib, bm25s are not installed. Run: pip install 'semgrad-guard[demo]'" in shown


def test_the_demo_asks_for_what_its_extra_brings() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    brought = [package for name in ("demo", "langchain", "grammar", "eval") for package in extras[name]]
    names = {re.split(r"[<>=\[]", package)[0] for package in brought} - {"semgrad-guard"}
    assert set(cli._NEEDED.values()) == names


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
    assert {estimator.name for estimator in (*paper_suite(), FusedStates())} == set(METHOD_NAMES)


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


# How much a command prints, and what a shell completes.


@pytest.fixture
def jobs(model_folder: Path, tmp_path: Path) -> dict[str, list[str]]:
    """A call of every command that does some work, with a broken line and a copy in its data."""
    rows = [{"question": q, "response": "x", "answers": ["x"], "paraphrases": [f"{q} Say it."]} for q in ASKED[:3]]
    data = ["--model", str(model_folder), "--data", str(jsonl(tmp_path / "d.jsonl", [*rows, rows[0], "{"]))]
    short = ["--max-tokens", "3"]
    evaluate = ["--methods", "gnll", "--no-report"]
    return {
        "ask": ["ask", "What?", "--model", str(model_folder), *short],
        "score": ["score", *data, "--output", str(tmp_path / "s.jsonl")],
        "calibrate": ["calibrate", *data, "--output", str(tmp_path / "c.json"), *short, "--copies", "once"],
        "evaluate": ["evaluate", *data, "--output", str(tmp_path / "e"), *short, *evaluate],
        "probe": ["probe", *data, "--output", str(tmp_path / "p.json"), "--no-answers"],
    }


@pytest.mark.parametrize("command", ["ask", "score", "calibrate", "evaluate", "probe"])
def test_quiet_leaves_warnings_and_results(run: Run, jobs: dict[str, list[str]], command: str) -> None:
    quiet, plain = run(*jobs[command], "--quiet"), run(*jobs[command])
    assert quiet.exit_code == plain.exit_code
    assert quiet.stdout
    assert all(line.startswith("Warning: ") for line in quiet.stderr.splitlines())
    assert (command == "ask") is (quiet.stderr == "")
    if command != "ask":
        assert "line 5 is not valid JSON" in quiet.stderr
        assert "Note: " in plain.stderr
        assert " of 3" in plain.stderr


def test_verbose_tells_of_the_model_and_where_an_error_began(run: Run, jobs: dict[str, list[str]]) -> None:
    loud = run(*jobs["ask"], "--verbose")
    assert loud.exit_code == 0
    assert "tiny is loaded in " in loud.stderr
    assert "4 layers, float64, fingerprint " in loud.stderr
    wrong = CliRunner().invoke(app, ["ask", "What?", "--model", "./nowhere", "-v"])
    assert wrong.exit_code == 1
    assert "Traceback" in wrong.stderr
    assert "Error: there is no folder './nowhere'" in wrong.stderr
    assert "Traceback" not in run("ask", "What?", "--model", "./nowhere").stderr  # one call's loudness is its own


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("semgrad-guard ", ("ask", "calibrate", "evaluate", "probe", "score", "demo")),
        ("semgrad-guard ask --max", ("--max-tokens",)),
        ("semgrad-guard score --estimator gn", ("gnll",)),
        ("semgrad-guard calibrate --grader ", ("exact-match", "token-f1", "rouge-l")),
    ],
)
def test_a_shell_completes(typed: str, offered: tuple[str, ...]) -> None:
    words = typed.split(" ")
    completion = {"_SEMGRAD_GUARD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    code = "from semgrad_guard.cli import app; app(prog_name='semgrad-guard')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **completion}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert set(offered) <= set(done.stdout.split()), done


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_this_processor_lacks_is_named(run: Run, dtype: str) -> None:
    """What is true differs between machines: /proc/cpuinfo has it for this one."""
    if not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64":
        pytest.skip("the flags of an x86 processor are read from /proc/cpuinfo")
    flags = Path("/proc/cpuinfo").read_text().split()
    units = {"bfloat16": {"avx512_bf16", "amx_bf16"}, "float16": {"avx512_fp16", "amx_fp16"}, "float32": {"fpu"}}
    result = run("ask", "What is the capital of Norway?", "--dtype", dtype, "--max-tokens", "3")
    assert ("--dtype float32" in result.stderr) == units[dtype].isdisjoint(flags)
    assert f"no instructions for {dtype}" in flat(result.stderr) or units[dtype] & set(flags)


def watched(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "ERR", Console(file=written, force_terminal=is_terminal, width=80, highlight=False))
    return written


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = watched(monkeypatch, is_terminal=True)
    with terminal.progress("Answering") as tell:
        for done in (20, 30, 40):
            tell(done, 60)
    assert "40/60" in written.getvalue()
    assert "Answering" in written.getvalue()


def test_a_log_sees_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    written = watched(monkeypatch, is_terminal=False)
    clock = iter([0.0, 5.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with terminal.progress("Answering") as tell:
        for done in (20, 30, 44, 45, 50):
            tell(done, 60)
    monkeypatch.undo()
    assert written.getvalue().splitlines() == [
        "Answering: 20 of 60",
        "Answering: 44 of 60, 2/s, 0:00:08 left",
        "Answering: 50 of 60, 1/s, 0:00:10 left",
    ]


# `plan`.


def test_a_plan_is_told_and_printed_as_json(run: Run) -> None:
    shown = run("plan", "--error", 0.2, "--auroc", 0.8)
    expected = [plan(n, error=0.2, auroc=0.8, alpha=0.1, delta=0.09) for n in (50, 100, 300, 1000)]
    assert shown.stdout.splitlines() == [
        "Any guard has to withhold at least 11.1% of the answers.",
        *(f"{one}." for one in expected),
    ]
    one = json.loads(run("plan", "--error", 0.2, "--auroc", 0.8, "--labels", 100, "--json").stdout)
    assert [row["n"] for row in one] == [100]
    assert (one[0]["found"], one[0]["withheld"], one[0]["delta"]) == (expected[1].found, pytest.approx(1 / 9), 0.1)


def test_a_plan_is_about_the_first_calibration_of_the_command(run: Run) -> None:
    """It keeps a tenth of delta, so that it takes 23 right answers, not 22."""
    shown = json.loads(run("plan", "--error", 0, "--auroc", 0.5, "--labels", 22, "--labels", 23, "--json").stdout)
    assert [row["found"] for row in shown] == [0, 1]


def test_a_plan_by_sentence_is_about_answers_whose_sentences_have_labels(run: Run) -> None:
    usual = ("plan", "--error", 0.3, "--auroc", 0.88, "--alpha", 0.2, "--labels", 100, "--by", "sentence")
    drop = json.loads(run(*usual, "--on-doubt", "drop", "--json").stdout)[0]
    stop = json.loads(run(*usual, "--on-doubt", "stop", "--json").stdout)[0]
    assert drop["unit"] == "sentences"
    assert drop["found"] > stop["found"]
    assert drop["coverage"] > stop["coverage"]
    assert "100 answers with labels find a threshold" in run(*usual).stdout


def test_without_an_auroc_a_table_over_several_is_shown(run: Run, tmp_path: Path) -> None:
    usual = ("plan", "--error", 0.3, "--alpha", 0.2, "--labels", 100)
    found = json.loads(run(*usual, "--json").stdout)
    assert [row["auroc"] for row in found] == [0.6, 0.7, 0.8, 0.9]
    assert [row["found"] for row in found] == sorted(row["found"] for row in found)
    shown = flat(run(*usual).stdout)
    assert "AUROC 100 labels" in shown
    assert f"0.80 {found[2]['found']:.0%} / {found[2]['coverage']:.0%}" in shown
    score = {"gnll": {"uncertainty": 0.1}}
    texts = ["It is so.", "It is so.", "It is"]
    rows = [
        {"key": str(i), "question": f"{i}?", "text": text, "finish_reason": "length", "scores": score}
        for i, text in enumerate(texts)
    ]
    record = jsonl(tmp_path / "c.answers.jsonl", [{"semgrad_guard_record": "answers", "settings": {}}, *rows])
    result = run("plan", "--error", 0.3, "--answers", record, "--json")
    assert [row["n"] for row in json.loads(result.stdout)] == [2] * 4
    assert "holds 3 answers, 2 of them with a score" in flat(result.stderr)
    record = jsonl(tmp_path / "cut.answers.jsonl", [{"semgrad_guard_record": "answers", "settings": {}}, rows[2]])
    refused = run("plan", "--error", 0.3, "--answers", record)
    assert refused.exit_code == 1
    assert "has a score, so labels cannot find a threshold: raise --max-tokens" in flat(refused.stderr)
