"""In front of a real upstream: it writes, and the guard decides, by a local copy of its weights or by its own
log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT, Front, Running

from semgrad_guard import LanguageModel
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.pocket import QUESTIONS_PATH
from semgrad_guard.records import Message

QUESTION = "What is the capital of France? Answer in one sentence."
CHAT = "/v1/chat/completions"
COPY = pytest.mark.parametrize("scorer", [True, False], ids=["copy", "reported"])
REPORTING = pytest.mark.parametrize("upstream", ["llama.cpp", "vllm"], indirect=True)


def body(upstream: Running, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": QUESTION}]
    return {"model": upstream.model, "messages": turns, "temperature": 0, "max_tokens": 24, **more}


def streamed(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def pieces_of(chunks: list[dict[str, Any]]) -> list[str]:
    deltas = (chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"])
    return [text for text in deltas if text]


def require_reported(upstream: Running, *, scorer: bool) -> None:
    if not scorer and upstream.kind == "transformers serve":
        pytest.skip("it reports no log-probabilities")


@pytest.fixture(scope="module")
def draft(upstream: Running) -> str:
    """The upstream's own answer."""
    found = httpx.post(f"{upstream.url}/chat/completions", json=body(upstream), timeout=300)
    return found.raise_for_status().json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def model(scorer_folder: Path) -> LanguageModel:
    return LanguageModel.from_pretrained(str(scorer_folder), dtype="float32")


@COPY
def test_what_is_let_through(upstream: Running, front: Front, draft: str, model: LanguageModel, scorer: bool) -> None:
    """Its scores are those of the weights."""
    require_reported(upstream, scorer=scorer)
    with front("--threshold", "1000", scorer=scorer) as client:
        whole = client.post(CHAT, json=body(upstream)).raise_for_status().json()
        chunks = streamed(client.post(CHAT, json=body(upstream, stream=True)).raise_for_status().text)
    assert whole["choices"][0]["message"]["content"] == "".join(pieces_of(chunks)) == draft
    assert whole["usage"]["completion_tokens"] > 0
    assert whole["choices"][0]["logprobs"]["content"] is None, "the client requested none"
    generation = model.generate([Message("user", QUESTION)])
    for record in (whole["semgrad_guard"], chunks[-1]["semgrad_guard"]):
        assert (record["status"], record["action"]) == ("scored", "answer")
        if scorer:
            expected = model.score([Message("user", QUESTION)], draft).hybridgrad
            assert record["uncertainty"] == pytest.approx(expected, rel=1e-3)
        elif generation.text == draft:
            expected = MaxProbability()(generation.evidence).uncertainty
            assert record["uncertainty"] == pytest.approx(expected, abs=0.02)


@COPY
def test_a_live_stream(upstream: Running, front: Front, draft: str, scorer: bool) -> None:
    sent = body(upstream, stream=True)
    with front("--mode", "annotate", scorer=scorer) as client, client.stream("POST", CHAT, json=sent) as response:
        chunks = streamed("".join(response.iter_text()))
    assert "".join(pieces_of(chunks)) == draft
    assert len(pieces_of(chunks)) > 2
    reported = scorer or upstream.kind != "transformers serve"
    record = chunks[-1]["semgrad_guard"]
    assert record["status"] == ("scored" if reported else "unscored")
    assert reported or "no log-probabilities" in record["reason"]


@COPY
def test_what_is_withheld(upstream: Running, front: Front, draft: str, scorer: bool) -> None:
    with front("--threshold", "-1", scorer=scorer) as client:
        for more in ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}):
            found = client.post(CHAT, json=body(upstream, **more)).raise_for_status()
            assert found.headers["x-semgrad-guard-action"] == "abstain"
            assert "I don't know." in found.text
            assert draft not in found.text
            assert draft.split()[-1] not in found.text


def test_other_routes(upstream: Running, front: Front) -> None:
    """Texts and responses are judged as chats are."""
    prompt = {"model": upstream.model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = {"model": upstream.model, "input": QUESTION, "temperature": 0}
    with front("--threshold", "-1") as client:
        assert client.post("/v1/embeddings", json={"model": upstream.model, "input": "x"}).status_code == 404
        for route, body_of_route in (("completions", prompt), ("responses", request)):
            held = client.post(f"/v1/{route}", json=body_of_route).raise_for_status()
            assert held.headers["x-semgrad-guard-action"] == "abstain"
            assert "I don't know." in held.text


@REPORTING
def test_a_calibration_by_the_servers_url(upstream: Running, front: Front, tmp_path: Path) -> None:
    """Made by the command of the page about this server, it decides here, and promises nothing about other calls."""
    page = ROOT / "docs" / {"vllm": "vllm.md"}.get(upstream.kind, "ollama.md")
    (line,) = (
        line for line in page.read_text().splitlines() if line.startswith("semgrad-guard calibrate --engine http")
    )
    command = line.split()
    for name, value in (("--engine", upstream.url), ("--model", upstream.model)):
        command[command.index(name) + 1] = value
    made, program = tmp_path / "served.json", [sys.executable, "-m", "semgrad_guard.cli"]
    rows = [row for row in QUESTIONS_PATH.read_text().splitlines() if "capital" in row][:30]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    command = [*program, *command[1:], "--alpha", "0.9", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    binding = json.loads(made.read_text())["binding"]
    assert (binding["model"], binding["settings"]) == (upstream.model, {"reported": True, "top_logprobs": 5})
    body_sent = {"model": upstream.model, "messages": [{"role": "user", "content": json.loads(rows[0])["question"]}]}
    with front("--calibration", str(made), "--max-tokens", "64", scorer=False) as client:
        options = ({}, {"temperature": 1})
        found = [client.post(CHAT, json=body_sent | more).raise_for_status().json() for more in options]
    usual, hot = (answer["semgrad_guard"] for answer in found)
    assert usual["threshold"] == json.loads(made.read_text())["threshold"]
    assert (usual["promised"], hot["promised"]) == (True, False)


@REPORTING
def test_guards_around_langchains_model(upstream: Running, tmp_path: Path, clients: Path) -> None:
    output = tmp_path / "found.json"
    program = ROOT / "scripts" / "upstreams" / "chains.py"
    done = subprocess.run([clients, program, upstream.url, upstream.model, output], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    value = found["through"][0]["numbers"]
    assert value[0] > 0
    for record in (*found["through"], found["live"][0]):
        decided = record["text"], record["status"], record["action"]
        assert decided == (found["own"], "scored", "answer"), record["reason"]
        assert record["numbers"] == pytest.approx(value, rel=1e-3)
    for record in found["held"]:
        assert (record["text"], record["action"]) == ("I don't know.", "abstain")
        assert found["own"].split()[-1] not in record["shown"]
    assert found["live"][1] > 2


def test_what_the_upstream_refuses_and_how_it_dies(upstream: Running, front: Front) -> None:
    """The last test with an upstream: it ends it."""
    with front("--threshold", "1000") as client:
        refused = client.post(CHAT, json=body(upstream, logit_bias="none"))
        assert refused.status_code in (400, 422, 502)
        assert refused.json()["error"]["code"] in ("upstream_refused", "upstream_failed")
        upstream.process.terminate()
        upstream.process.wait(60)
        gone = client.post(CHAT, json=body(upstream))
        assert (gone.status_code, gone.json()["error"]["code"]) == (502, "upstream_failed")
