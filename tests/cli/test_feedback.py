"""A sheet of answers drawn at random, and the grades that come back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.decision_log import DecisionLog
from tests.decision_log.test_feedback import written

from .helpers import flat
from .test_serve import Run


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
    assert "3 grades are in the log; 3 of them count for a promise as they are" in flat(result.stdout)
    assert "row 4 has 'maybe' under correct" in flat(result.stderr)
    assert "'dec_no' is passed over: there is no decision of this id" in flat(result.stderr)
    again = run("feedback", sheet, "--log", path, "--sampling", "user")
    assert "2 grades: the answer was graded right before (random): it counts once; it was not" in flat(again.stderr)
    run("sample", "--log", path, "--output", sheet)
    empty = run("sample", "--log", path, "--output", sheet)
    assert "no promised answer that was not drawn before" in flat(empty.stderr)
    assert len(sheet.read_text().splitlines()) == 1 + 5 + 1 + 3
    assert run("feedback", tmp_path / "no.csv", "--log", path).exit_code == 1
    database = Database(path)
    assert {feedback.sampling for _, feedback in database.decisions() if feedback} == {"user"}
    database.close()
