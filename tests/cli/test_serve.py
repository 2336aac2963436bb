"""`semgrad-guard serve` and `decisions`, as they are run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import httpx

from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.records import SentenceVerdict, Verdict
from tests.decision_log.test_savings import decision
from tests.steps import LIMIT
from tests.warm_python import WarmPython

from .helpers import Run, flat


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
