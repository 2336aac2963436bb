"""In front of a real upstream: it writes, the local copy of the weights scores, and the guard decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Front, Running

from semgrad_guard import LanguageModel
from semgrad_guard.records import Message

QUESTION = "What is the capital of France? Answer in one sentence."
CHAT = "/v1/chat/completions"


def body(upstream: Running, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": QUESTION}]
    return {"model": upstream.model, "messages": turns, "temperature": 0, "max_tokens": 24, **more}


def streamed(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def draft(upstream: Running) -> str:
    """The upstream's own answer."""
    found = httpx.post(f"{upstream.url}/chat/completions", json=body(upstream), timeout=300)
    return found.raise_for_status().json()["choices"][0]["message"]["content"]


def test_what_is_let_through(upstream: Running, front: Front, draft: str, scorer: Path) -> None:
    model = LanguageModel.from_pretrained(str(scorer), dtype="float32")
    expected = model.score([Message("user", QUESTION)], draft).hybridgrad
    with front("--threshold", "1000") as client:
        whole = client.post(CHAT, json=body(upstream)).raise_for_status().json()
        chunks = streamed(client.post(CHAT, json=body(upstream, stream=True)).raise_for_status().text)
    assert whole["choices"][0]["message"]["content"] == draft
    assert whole["usage"]["completion_tokens"] > 0
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == draft
    for record in (whole["semgrad_guard"], chunks[-1]["semgrad_guard"]):
        assert (record["status"], record["action"]) == ("scored", "answer")
        assert record["uncertainty"] == pytest.approx(expected, rel=1e-3)


def test_a_live_stream(upstream: Running, front: Front, draft: str) -> None:
    with front("--mode", "annotate") as client, client.stream("POST", CHAT, json=body(upstream, stream=True)) as sent:
        chunks = streamed("".join(sent.iter_text()))
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(pieces) == draft
    assert len([piece for piece in pieces if piece]) > 2
    assert chunks[-1]["choices"][0]["logprobs"]["semgrad_guard"]["status"] == "scored"


def test_what_is_withheld(upstream: Running, front: Front, draft: str) -> None:
    with front("--threshold", "-1") as client:
        for stream in (False, True):
            found = client.post(CHAT, json=body(upstream, stream=stream, logprobs=True)).raise_for_status()
            assert found.headers["x-semgrad-guard-action"] == "abstain"
            assert "I don't know." in found.text
            assert draft not in found.text
            assert draft.split()[-1] not in found.text


def test_without_a_copy_only_reported_answers_are_scored(upstream: Running, front: Front) -> None:
    """`transformers serve` ignores the request for log-probabilities."""
    with front("--mode", "annotate", scorer=False) as client:
        record = client.post(CHAT, json=body(upstream)).raise_for_status().json()["semgrad_guard"]
    reported = upstream.kind != "transformers serve"
    assert record["status"] == ("scored" if reported else "unscored")
    assert reported or "no log-probabilities" in record["reason"]


def test_other_routes(upstream: Running, front: Front) -> None:
    """Texts and responses are judged as chats are; what no rule judges is refused."""
    prompt = {"model": upstream.model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = {"model": upstream.model, "input": QUESTION, "temperature": 0}
    with front("--threshold", "-1") as client:
        refused = client.post("/v1/embeddings", json={"model": upstream.model, "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "route_not_guarded")
        for route, body_of_route in (("completions", prompt), ("responses", request)):
            held = client.post(f"/v1/{route}", json=body_of_route).raise_for_status()
            assert held.headers["x-semgrad-guard-action"] == "abstain"
            assert "I don't know." in held.text


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
