"""`semgrad-guard serve` and the commands about its log, as they are run."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")


import httpx
import pytest

from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.records import SentenceVerdict, Verdict
from tests.decision_log.test_feedback import decision
from tests.steps import LIMIT
from tests.warm_python import WarmPython

from .helpers import Run, flat

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard import Calibration, calibrate
from semgrad_guard.decision_log.database import Database
from tests.decision_log.test_feedback import written


def test_a_server_from_start_to_end(warm_python: WarmPython, model_folder: Path, tmp_path: Path, run: Run) -> None:
    log = tmp_path / "log.db"
    command = ["-m", "semgrad_guard.cli", "serve", "--model", str(model_folder), "--threshold", "-1"]
    (tmp_path / "limits.json").write_text('{"max_prompt_tokens": 100}')
    limits = ["--max-tokens", "4", "--settings", str(tmp_path / "limits.json")]
    with warm_python.start([*command, "--port", "0", "--log", str(log), *limits, "--quiet"]) as process:
        line = process.stdout.readline()
        assert line.startswith("Serving tiny at http://127.0.0.1:"), line
        url = line.split()[-1]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        found = httpx.post(f"{url}/chat/completions", json=body, timeout=LIMIT)
        decision_id = found.json()["semgrad_guard"]["decision_id"]
        assert found.headers["x-semgrad-guard-action"] == "abstain"
        assert "server" not in found.headers
        long = body | {"messages": [{"role": "user", "content": "x" * 100}]}
        refused = httpx.post(f"{url}/chat/completions", json=long, timeout=LIMIT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "this server takes 100" in refused.json()["error"]["message"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    shown = run("decisions", "--log", log, "--json")
    assert json.loads(shown.stdout)["summary"]["abstain"] == 1
    listed = run("decisions", "--log", log, "--csv").stdout.splitlines()
    assert listed[0].startswith("id,at,request_id")
    assert listed[1].startswith(decision_id)


def test_a_server_ends_in_good_order_from_its_first_line_on(
    warm_python: WarmPython, model_folder: Path, tmp_path: Path
) -> None:
    command = ["-m", "semgrad_guard.cli", "serve", "--model", str(model_folder), "--threshold", "-1"]
    with warm_python.start([*command, "--port", "0", "--log", str(tmp_path / "log.db")]) as process:
        assert " at http://127.0.0.1:" in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0


def test_savings_are_shown(tmp_path: Path, run: Run) -> None:
    """With a sum of money only at a price that the user gives."""
    numbers = {"prompt_tokens": 1000, "draft_tokens": 100}
    with DecisionLog(tmp_path / "log.db") as log:
        log.database.add([decision(number, "answer", **numbers) for number in range(20)] + [decision(99, "escalate")])
    command = ("decisions", "--since", "2025-01-01", "--log", tmp_path / "log.db")
    plain, priced = flat(run(*command).stdout), flat(run(*command, "--price", "2.5/10").stdout)
    assert "of 20 answered here: 20,000 prompt and 2,000 answer tokens" in plain
    assert "a million" not in plain
    assert "At 2.5/10 for a million tokens that is about 0.07." in priced


def test_no_text_of_a_client_is_a_formula(tmp_path: Path, run: Run) -> None:
    """Spreadsheets run cells that begin so."""
    verdict = Verdict.of(status="scored", action="answer", text="=1+1", estimator="e", model="m", uncertainty=-0.25)
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        log.write(verdict, facts=Facts(question="@SUM(A1)", served="-2+3"))
    (row,) = csv.DictReader(run("decisions", "--log", tmp_path / "log.db", "--csv").stdout.splitlines())
    found = [row[name] for name in ("question", "delivered", "served", "uncertainty")]
    assert found == ["'@SUM(A1)", "'=1+1", "'-2+3", "-0.25"]


def test_decisions_are_shown(tmp_path: Path, run: Run) -> None:
    verdict = Verdict.of(status="scored", action="answer", text="", estimator="e", model="m", uncertainty=0.25)
    with DecisionLog(tmp_path / "log.db") as log:
        first = str(log.write(verdict, facts=Facts(served="s")))
        log.write(verdict.model_copy(update={"action": "abstain", "drift": True}))
        log.database.mark_drawn([first])
        log.feedback(first, right=True)
    shown = flat(run("decisions", "--log", tmp_path / "log.db").stdout)
    assert "decisions answer escalate abstain unscored drift coverage" in shown
    assert "since 7d 2 1 0 1 0 1 0.50" in shown
    assert "Feedback (random): 1 right, 0 wrong." in shown
    assert "Flagged" not in shown
    assert json.loads(run("decisions", "--log", tmp_path / "log.db", "--json").stdout)["summary"]["coverage"] == 0.5
    with DecisionLog(tmp_path / "log.db") as log:
        log.write(verdict.revised(action="abstain", enforced=False))
        judged = (SentenceVerdict(start=0, end=3, uncertainty=0.2), SentenceVerdict(start=3, end=3, action="drop"))
        log.write(verdict.model_copy(update={"sentences": judged}))
    shown = flat(run("decisions", "--log", tmp_path / "log.db").stdout)
    assert "since 7d 4 3 0 1 0 1 0.75" in shown
    assert "Partly withheld: some sentences of 1 answers were left out." in shown
    assert "Flagged: 1 answers went out against the advice" in shown
    assert run("decisions", "--log", tmp_path / "log.db", "--csv").stdout.splitlines()[1].endswith(",answer")
    assert "Promise of calibration" not in shown
    with DecisionLog(tmp_path / "log.db") as log:
        promised = verdict.model_copy(update={"promised": True, "calibration_id": "c1"})
        log.write(promised, facts=Facts(alpha=0.1, delta=0.1))
    shown = flat(run("decisions", "--log", tmp_path / "log.db").stdout)
    assert "Promise of calibration c1: Unknown: no answer that was drawn at random is graded yet" in shown
    found = json.loads(run("decisions", "--log", tmp_path / "log.db", "--json").stdout)
    assert found["promises"][0]["state"] == "unknown"


# A sheet of answers drawn at random, and the grades that come back.


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
