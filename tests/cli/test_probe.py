"""`probe`: the command, its files, and its output."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import TokenChoice
from semgrad_guard.paper import probing
from tests.ports import send, serving

from .helpers import ASKED, Run, flat, jsonl


@pytest.fixture
def data(tmp_path: Path, language_model: LanguageModel) -> Path:
    answers = language_model.generate_batch(ASKED[:8], GenerationOptions(max_tokens=64))
    rows = (
        {"question": q, "paraphrases": [f"Say what item {i} is."], "answers": [one.text if i % 2 else "never"]}
        for i, (q, one) in enumerate(zip(ASKED[:8], answers, strict=True))
    )
    return jsonl(tmp_path / "q.jsonl", rows)


@pytest.fixture
def run_probe(run: Run, model_folder: Path, tmp_path: Path) -> Run:
    given = ("--model", model_folder, "--output", tmp_path / "p.json")
    return lambda *more: run("probe", *given, *more)


def test_record_pictures_and_words(run_probe: Run, data: Path, tmp_path: Path) -> None:
    result = run_probe("--data", data)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "p.sps.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.auroc.png").read_bytes().startswith(b"\x89PNG")
    assert TokenChoice.load(tmp_path / "p.json").offset is None
    stdout = flat(result.stdout)
    assert "the template's" in stdout
    assert "4 of 8 right (contains@3)" in stdout
    assert "t* = -11: the chat template's own place (-11)" in stdout
    assert f"Pictures: {tmp_path / 'p.sps.png'}" in result.stdout


def test_json_alone_without_answers(run_probe: Run, data: Path, tmp_path: Path) -> None:
    result = run_probe("--data", data, "--json", "--no-answers")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["graded"] is None
    assert record["questions"] == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "p.sps.png", "q.jsonl"]


def test_without_paraphrases_nothing_is_done(run_probe: Run, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "q.jsonl", ({"question": q} for q in ASKED[:3]))
    result = run_probe("--data", data)
    assert result.exit_code == 1
    assert "0 of the 3 questions have paraphrases" in flat(result.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]


def reworded(request: BaseHTTPRequestHandler) -> None:
    """The answer of a chat model behind OpenAI's protocol, which rewords questions about items."""
    body = json.loads(request.rfile.read(int(request.headers["content-length"])))
    number = re.findall(r"item (\d+)", body["messages"][0]["content"])[-1]
    text = f"1. Say what item {number} is?\n2. Which thing is item {number}?"
    answer = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    send(request, json.dumps(answer).encode(), "application/json")


def test_a_model_of_a_server_writes_the_paraphrases(run_probe: Run, tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="the extra `serve` is not installed")
    data = jsonl(tmp_path / "q.jsonl", ({"question": q} for q in ASKED[:4]))
    with serving(reworded) as address:
        result = run_probe("--data", data, "--no-answers", "--json", "--paraphrases", f"{address}/v1#large")
    assert result.exit_code == 0, result.stderr
    assert (json.loads(result.stdout)["questions"], json.loads(result.stdout)["without_paraphrases"]) == (4, 0)
    assert "Which thing is item 3?" in (tmp_path / "p.paraphrases.jsonl").read_text()


def test_a_model_that_writes_none_is_told(run: Run, tmp_path: Path) -> None:
    """The embedded model answers instead of rewording."""
    data = jsonl(tmp_path / "q.jsonl", ({"question": f"What is the capital of {c}?"} for c in ("Japan", "Peru")))
    result = run("probe", "--data", data, "--output", tmp_path / "p.json", "--paraphrases", "itself", "--no-answers")
    assert result.exit_code == 1
    assert "0 of the 2 questions have paraphrases" in flat(result.stderr)


def test_some_without_paraphrases_and_a_broken_line(run_probe: Run, data: Path, tmp_path: Path) -> None:
    more = jsonl(tmp_path / "more.jsonl", [*data.read_text().splitlines(), '{"question": "Alone?"}', "{"])
    result = run_probe("--data", more, "--no-answers")
    assert result.exit_code == 5
    assert "1 of 9 questions have no paraphrases" in flat(result.stderr)
    assert "line 10 is not valid JSON" in flat(result.stderr)


def test_ctrl_c_says_how_to_go_on(run_probe: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probing, "collect_grids", interrupted)
        result = run_probe("--data", data)
    assert result.exit_code == 130
    assert "Run the same command again to continue" in flat(result.stderr)
    assert run_probe("--data", data).exit_code == 0
