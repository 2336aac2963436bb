"""Who ends a command from outside finds no lock and no stump afterwards, an exit code, and one line that reports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard.cli import loading, terminal
from tests.steps import LIMIT
from tests.warm_python import WarmPython

from .helpers import jsonl
from .test_interrupt import arguments, held, wait_until_held

Run = Callable[..., Result]
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

    monkeypatch.setattr(loading, "load", interrupted)
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


def test_a_terminated_calibration_leaves_no_lock(
    warm_python: WarmPython, model_folder: Path, right: Path, tmp_path: Path
) -> None:
    output, record = tmp_path / "c.json", tmp_path / "c.answers.jsonl"
    command = held(record, 5, arguments(model_folder, right, output))
    with warm_python.start(command) as process:
        wait_until_held(record, process)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (143, "")
    assert stderr.splitlines()[-1].startswith("Ended by SIGTERM: ")
    assert "answers are kept in" in stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"right.jsonl", "c.answers.jsonl"}


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
