"""A sheet of answers drawn at random, and the grades that come back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard import Calibration, calibrate
from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.decision_log import DecisionLog
from tests.decision_log.test_feedback import written

from .helpers import Run, flat


def test_a_sheet_goes_out_and_comes_back(tmp_path: Path, run: Run) -> None:
    path, sheet = tmp_path / "log.db", tmp_path / "sheet.csv"
    with DecisionLog(path, text=True) as log:
        ids = written(log, 8, text="=an answer")
    assert run("sample", "--log", path, "--size", 5, "--output", sheet).exit_code == 0
    rows = list(csv.DictReader(sheet.read_text("utf-8-sig").splitlines()))
    assert len(rows) == 5
    assert {row["key"] for row in rows} < set(ids)
    assert {row["answer"] for row in rows} == {"'=an answer"}
    filled = "".join(f"{row['key']},{word}\n" for row, word in zip(rows, ["yes", "no", "maybe", "", "1"], strict=True))
    sheet.write_text(f"key,correct\n{filled}dec_no,yes\n")
    result = run("feedback", sheet, "--log", path)
    assert result.exit_code == 5
    assert "3 grades are in the log; 3 of them are new, and count for a promise" in flat(result.stdout)
    assert "row 4 has 'maybe' under correct" in flat(result.stderr)
    assert "'dec_no' is passed over: there is no decision of this id" in flat(result.stderr)
    again = run("feedback", sheet, "--log", path)
    assert "2 grades: the answer was graded right before (random): it counts once." in flat(again.stderr)
    run("sample", "--log", path, "--output", sheet)
    empty = run("sample", "--log", path, "--output", sheet)
    assert "no promised answer that was not drawn before" in flat(empty.stderr)
    assert len(sheet.read_text().splitlines()) == 1 + 5 + 1 + 3
    assert run("feedback", tmp_path / "no.csv", "--log", path).exit_code == 1
    assert "there is no decision log at" in flat(run("feedback", sheet, "--log", tmp_path / "no.db").stderr)
    database = Database(path)
    assert {feedback.sampling for _, feedback in database.decisions() if feedback} == {"random"}
    database.close()


def test_a_proposal_is_a_file_of_its_own(tmp_path: Path, run: Run) -> None:
    path, given, output = tmp_path / "log.db", tmp_path / "now.json", tmp_path / "new.json"
    old = calibrate([n / 100 for n in range(100)], [n < 80 for n in range(100)], alpha=0.2, delta=0.1)
    old.save(given)
    with DecisionLog(path) as log:
        changes = {"calibration_id": old.id, "threshold": old.threshold}
        ids = [written(log, 1, uncertainty=n / 100, **changes)[0] for n in range(60)]
        written(log, 40, action="abstain", promised=False, uncertainty=0.9, **changes)
        log.database.mark_drawn(ids)
        for n, one in enumerate(ids):
            log.feedback(one, right=n < 45)
    result = run("recalibrate", "--calibration", given, "--log", path, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "by the grades of 60 answers drawn at random, 15 of them wrong" in flat(result.stdout)
    assert f"Calibration {old.id} still decides" in flat(result.stdout)
    assert Calibration.load(output).tries == 1
    assert Calibration.load(given) == old
    run("recalibrate", "--calibration", given, "--log", path, "--output", output)
    assert Calibration.load(output).tries == 2
    same = run("recalibrate", "--calibration", given, "--log", path, "--output", given)
    assert "give the proposal a file of its own" in flat(same.stderr)
    nothing = run("recalibrate", "--calibration", given, "--log", path, "--since", "2100-01-01", "--output", output)
    assert "none of its answers drawn at random is graded" in flat(nothing.stderr)
