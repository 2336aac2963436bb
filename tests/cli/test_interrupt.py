"""Ctrl-C in the middle of a real calibration: a valid record, a hint how to resume, and the same result after all."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result

from semgrad_guard import Calibration
from tests.warm_python import Program, WarmPython

from .helpers import ASKED

Run = Callable[..., Result]


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


def test_an_interrupted_calibration_continues(
    run: Run, warm_python: WarmPython, model_folder: Path, right: Path, tmp_path: Path
) -> None:
    output, record = tmp_path / "c.json", tmp_path / "c.answers.jsonl"
    command = held(record, 17, arguments(model_folder, right, output))
    with warm_python.start(command, folder=tmp_path) as process:
        wait_until_held(record, process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()

    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    header, *kept = [json.loads(line) for line in record.read_text().splitlines()]
    assert header["semgrad_guard_record"] == "answers"
    assert len(kept) == 16
    assert f"16 of {len(ASKED)} answers are kept in {record}. Run the same command again to continue." in stderr
    assert not output.exists()

    continued = run(*arguments(model_folder, right, output))
    assert continued.exit_code == 0, continued.stderr
    assert f"Answering: 16 of {len(ASKED)}" in continued.stderr
    whole = run(*arguments(model_folder, right, tmp_path / "whole.json"))
    assert whole.exit_code == 0
    assert Calibration.load(output) == Calibration.load(tmp_path / "whole.json")
    assert record.read_bytes() == (tmp_path / "whole.answers.jsonl").read_bytes()
