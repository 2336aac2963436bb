"""`calibrate --engine URL`, and `serve` with its calibration: no copy of the model is here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import Calibration, GenerationOptions, LanguageModel, Policy
from semgrad_guard.estimators import HybridGrad
from semgrad_guard.guard import Answerer, Terms
from tests.ports import free_port
from tests.steps import until

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import httpx
import uvicorn

from semgrad_guard.server.app import make_app
from semgrad_guard.server.assembly import assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.server.service import ServedModel, Service

from .helpers import TOKENS, Run, flat, jsonl, merged


@pytest.fixture(scope="module")
def url(language_model: LanguageModel) -> Iterator[str]:
    """A server of the tiny model on a port of its own."""
    terms = Terms(policy=Policy(threshold=1e9), mode="annotate")
    scheduler = Scheduler(Answerer(language_model, HybridGrad()))
    served = ServedModel(
        name="tiny", scheduler=scheduler, terms=terms, options=GenerationOptions(max_tokens=64), scores_texts=True
    )
    port = free_port()
    config = uvicorn.Config(make_app(Service([served])), port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()
    scheduler.close()


@pytest.fixture
def calibrate(run: Run, right: Path, tmp_path: Path, url: str) -> Run:
    files = ("--data", right, "--output", tmp_path / "c.json")
    fixed = ("--engine", url, "--model", "tiny", *files, "--max-tokens", TOKENS, "--on-cut", "score")
    return lambda *more: run("calibrate", *merged(fixed, more))


def kept_behind(url: str, calibration: Path, questions: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of a server that guards the one at `url` by this calibration."""
    usual: dict[str, Any] = {"upstream": url, "model": "tiny", "max_tokens": TOKENS, "no_log": True}
    server = assemble(ServerSettings(**usual, calibration=str(calibration)), keys=Keys([]), hosts=None)

    async def answered() -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            bodies = [{"model": "tiny", "messages": [{"role": "user", "content": one}]} for one in questions]
            return [(await client.post("/v1/chat/completions", json=body)).json() for body in bodies]

    try:
        return asyncio.run(answered())
    finally:
        server.service.close()


def kept_rows(folder: Path) -> list[dict[str, Any]]:
    """The recorded answers; the header counts the tries."""
    return [json.loads(line) for line in (folder / "c.answers.jsonl").read_text().splitlines()[1:]]


@pytest.mark.parametrize("estimator", ["max_probability", "top_entropy"])
def test_a_calibration_of_a_server_is_kept_behind_it(calibrate: Run, tmp_path: Path, url: str, estimator: str) -> None:
    result = calibrate("--estimator", estimator)
    assert result.exit_code == 0, result.stderr
    made, rows = Calibration.load(tmp_path / "c.json"), kept_rows(tmp_path)[:3]
    assert (made.binding.model, made.binding.estimator) == ("tiny", estimator)
    assert made.binding.options == {"temperature": 0, "max_tokens": TOKENS}
    found = kept_behind(url, tmp_path / "c.json", [row["question"] for row in rows])
    for row, answer in zip(rows, found, strict=True):
        record, uncertainty = answer["semgrad_guard"], row["scores"][estimator]["uncertainty"]
        let_through = uncertainty <= (made.threshold or 0)
        assert (record["action"] == "answer", record["promised"]) == (let_through, let_through)
        if let_through:
            assert answer["choices"][0]["message"]["content"] == row["text"]
            assert record["uncertainty"] == pytest.approx(uncertainty, rel=1e-6)


def test_a_calibration_by_sentence_is_kept_behind_it(calibrate: Run, tmp_path: Path, url: str) -> None:
    result = calibrate("--by", "sentence", "--on-doubt", "drop", "--estimator", "gnll")
    made, rows = Calibration.load(tmp_path / "c.json"), kept_rows(tmp_path)
    assert made.sentences is not None, result.stderr
    unit = {"by": "sentence", "on_doubt": "drop"}
    assert made.binding.settings == {"reported": True, "top_logprobs": 5, **unit}
    assert rows[0]["sentences"][0]["scores"]["gnll"] == rows[0]["scores"]["gnll"]
    (found,) = kept_behind(url, tmp_path / "c.json", [rows[0]["question"]])
    own = rows[0]["sentences"][0]["scores"]["gnll"]["uncertainty"]
    assert (found["semgrad_guard"]["action"] == "answer") == (own <= (made.threshold or -1.0))
    assert calibrate("--by", "sentence", "--on-doubt", "stop").exit_code in (0, 2)
    assert kept_rows(tmp_path) == rows
    assert "by is None and was 'sentence'" in flat(calibrate().stderr)


def test_it_resumes(calibrate: Run, tmp_path: Path) -> None:
    assert calibrate().exit_code == 0
    before = kept_rows(tmp_path)
    assert calibrate("--estimator", "gnll").exit_code == 0
    assert kept_rows(tmp_path) == before
    for more, says in (
        (("--engine", "http://127.0.0.1:1/v1", "--output", str(tmp_path / "o.json")), "cannot be reached"),
        (("--model", "other", "--output", str(tmp_path / "p.json")), "status 404"),
    ):
        result = calibrate(*more)
        assert (result.exit_code, says in flat(result.stderr)) == (1, True), result.stderr


def test_a_servers_calibration_has_a_gate(calibrate: Run, run: Run, right: Path, tmp_path: Path, url: str) -> None:
    few = jsonl(tmp_path / "few.jsonl", right.read_text().splitlines()[:25])
    assert calibrate("--data", few).exit_code == 0
    made = ("gate", "--calibration", tmp_path / "c.json", "--data", few, "--band", tmp_path / "band.json")
    served = (*made, "--engine", url, "--model", "tiny", "--max-tokens", TOKENS)
    assert run(*served, "--record").exit_code == 0
    assert run(*served).exit_code == 0
    other = run(*served[:-1], 3)
    assert "made with max_tokens 4, and these would be with 3" in flat(other.stderr)
    assert (other.exit_code, run(*served, "--device", "cpu").exit_code) == (1, 2)
