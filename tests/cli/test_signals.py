"""Who ends a command from outside finds no lock and no stump, an exit code, and one line that reports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from semgrad_guard import Calibration
from semgrad_guard.cli import from_options, terminal
from tests.steps import LIMIT
from tests.warm_python import Program, WarmPython

from .helpers import ASKED, Run, jsonl


def arguments(model: Path, data: Path, output: Path) -> list[str]:
    fixed = ["calibrate", "--max-tokens", "4", "--on-cut", "score", "--json"]
    return [*fixed, "--model", str(model), "--data", str(data), "--output", str(output)]


def held(record: Path, lines: int, arguments: Sequence[str]) -> list[str]:
    """The command of a run that goes no further once its record has so many lines."""
    return [str(Path(__file__).with_name("held_program.py")), str(record), str(lines), *arguments]


def wait_until_held(record: Path, process: Program | subprocess.Popen[str]) -> None:
    """Wait until a run holds itself. One that ends before that fails."""
    while not record.with_suffix(".held").exists():
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
            pytest.fail(f"the run has ended: {process.communicate()}")
    record.with_suffix(".held").unlink()


@pytest.mark.parametrize(
    ("name", "code", "last"),
    [("SIGINT", 130, "Interrupted: "), ("SIGTERM", 143, "Ended by SIGTERM: "), ("SIGKILL", -9, "")],
)
def test_an_ended_calibration_continues(
    run: Run,
    warm_python: WarmPython,
    model_folder: Path,
    right: Path,
    usual_calibration: Path,
    tmp_path: Path,
    name: str,
    code: int,
    last: str,
) -> None:
    """It keeps others out while it runs, and leaves no lock; nothing of it is lost."""
    output, record = tmp_path / "c.json", tmp_path / "c.answers.jsonl"
    command = held(record, 17, arguments(model_folder, right, output))
    with warm_python.start(command, folder=tmp_path) as process:
        wait_until_held(record, process)
        assert "Another run is writing" in run(*arguments(model_folder, right, output)).stderr
        process.send_signal(getattr(signal, name))
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout, "Traceback" in stderr) == (code, "", False)
    if last:
        kept = f"16 of {len(ASKED)} answers are kept in {record}. Run the same command again to continue."
        assert stderr.splitlines()[-1] == last + kept
        assert {path.name for path in tmp_path.iterdir()} == {"right.jsonl", "c.answers.jsonl"}
    assert len(record.read_text().splitlines()) == 17
    continued = run(*arguments(model_folder, right, output))
    assert continued.exit_code == 0, continued.stderr
    assert f"Answering: 16 of {len(ASKED)}" in continued.stderr
    assert Calibration.load(output) == Calibration.load(usual_calibration / "calibration.json")
    assert record.read_bytes() == (usual_calibration / "calibration.answers.jsonl").read_bytes()


SIGNALS = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize(("command", "shown"), [("probe", "Run the same command again"), ("score", "Nothing is kept.")])
def test_a_signal_while_a_model_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str, name: str
) -> None:
    number = getattr(signal, name)
    if signal.getsignal(number) is signal.SIG_IGN:  # as where a shell has put the tests into the background
        signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)

    def interrupted(*_args: object, **_named: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(LIMIT)  # the signal ends it; where another thread takes the signal, that comes a moment later

    monkeypatch.setattr(from_options, "load", interrupted)
    before = signal.getsignal(number)
    rows = [{"question": q, "response": "r", "paraphrases": ["p"]} for q in ("a", "b")]
    data = jsonl(tmp_path / "d.jsonl", rows)
    result = run(command, "--data", data, "--output", tmp_path / "out.json")
    assert result.exit_code == 128 + number
    assert shown in result.stderr.splitlines()[-1]
    assert ("Interrupted" if name == "SIGINT" else f"Ended by {name}") in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminal.orderly_end():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("closed", ["at once", "by its reader"])
def test_a_closed_stdout_is_named(warm_python: WarmPython, model_folder: Path, closed: str) -> None:
    command = ["-m", "semgrad_guard.cli", "ask", "What?", "--model", str(model_folder)]
    reader, writer = os.pipe()
    os.close(reader)
    if closed == "by its reader":
        done = warm_python.run(command, stdout=writer)
    else:  # Python looks for it as it starts
        pipe, whole = subprocess.PIPE, [sys.executable, *command]
        done = subprocess.run(whole, stderr=pipe, text=True, preexec_fn=lambda: os.close(1), check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "closed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
