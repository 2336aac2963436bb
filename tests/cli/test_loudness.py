"""How much a command prints, what its options were called, and what a shell completes."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from semgrad_guard.cli import app, terminal

from .helpers import ASKED, Run, flat, jsonl


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
