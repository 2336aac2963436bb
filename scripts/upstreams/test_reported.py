"""In front of a real upstream without a copy of its model: its own log-probabilities are the score."""

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
from test_upstreams import CHAT, QUESTION, body, streamed

from semgrad_guard import LanguageModel
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.pocket import QUESTIONS_PATH
from semgrad_guard.records import Message

pytestmark = pytest.mark.parametrize("upstream", ["llama.cpp", "vllm"], indirect=True)


@pytest.fixture(scope="module")
def own(upstream: Running) -> dict[str, Any]:
    found = httpx.post(f"{upstream.url}/chat/completions", json=body(upstream), timeout=300)
    return found.raise_for_status().json()["choices"][0]


def test_scores_are_those_of_the_weights(upstream: Running, front: Front, own: dict[str, Any], scorer: Path) -> None:
    draft = own["message"]["content"]
    model = LanguageModel.from_pretrained(str(scorer), dtype="float32")
    generation = model.generate([Message("user", QUESTION)])
    with front("--threshold", "1000", scorer=False) as client:
        whole = client.post(CHAT, json=body(upstream)).raise_for_status().json()
        chunks = streamed(client.post(CHAT, json=body(upstream, stream=True)).raise_for_status().text)
    assert whole["choices"][0]["message"]["content"] == draft
    assert whole["choices"][0]["logprobs"]["content"] is None, "the client requested none"
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == draft
    first, second = whole["semgrad_guard"], chunks[-1]["semgrad_guard"]
    assert first["uncertainty"] == pytest.approx(second["uncertainty"], rel=1e-3)
    for record in (first, second):
        assert (record["status"], record["action"], record["estimator"]) == ("scored", "answer", "max_probability")
    if generation.text == draft:
        expected = MaxProbability()(generation.evidence).uncertainty
        assert first["uncertainty"] == pytest.approx(expected, abs=0.02)


def test_what_is_withheld(upstream: Running, front: Front, own: dict[str, Any]) -> None:
    draft = own["message"]["content"]
    with front("--threshold", "-1", scorer=False) as client:
        for more in ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}):
            found = client.post(CHAT, json=body(upstream, **more)).raise_for_status()
            assert found.headers["x-semgrad-guard-action"] == "abstain"
            assert "I don't know." in found.text
            assert draft not in found.text
            assert draft.split()[-1] not in found.text


def test_a_live_stream(upstream: Running, front: Front, own: dict[str, Any]) -> None:
    body_sent = body(upstream, stream=True)
    with front("--mode", "annotate", scorer=False) as client, client.stream("POST", CHAT, json=body_sent) as sent:
        chunks = streamed("".join(sent.iter_text()))
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(pieces) == own["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 2
    assert chunks[-1]["semgrad_guard"]["status"] == "scored"


def test_a_calibration_by_the_servers_url(upstream: Running, front: Front, tmp_path: Path) -> None:
    """Made by the command of the page about this server, it decides here, and promises nothing about other calls."""
    page = ROOT / "docs" / {"vllm": "vllm.md"}.get(upstream.kind, "ollama.md")
    (line,) = (line for line in page.read_text().splitlines() if line.startswith("semgrad-guard calibrate --server"))
    command = line.split()
    for name, value in (("--server", upstream.url), ("--model", upstream.model)):
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
