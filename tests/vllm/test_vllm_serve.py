"""`vllm serve` with our plugin: the same answers, scores and decisions as everywhere, and no way around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make check-vllm has an environment for it")

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.named import folder_of
from tests.ports import free_port
from tests.steps import LIMIT, until

from .conftest import ENVIRONMENT, THINKING, made
from .counting import COUNTED
from .test_served import ENGINE, FORM, QUESTIONS, done, formed

pytestmark = pytest.mark.heavy

WORKER = "semgrad_guard.server.in_vllm.scoring_worker.ScoringWorker"
NAMED = ("--served-model-name", "model")
PARAGRAPH = "Tell me about Paris in three sentences."
FORMS = ("--structured-outputs-config.backend", "guidance")
SIZE = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager", *NAMED, *FORMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("vllm-serve") / "model")


@pytest.fixture(scope="module")
def own(folder: Path) -> LanguageModel:
    return LanguageModel.from_pretrained(str(folder), dtype="float32")


@contextmanager
def started(
    folder: Path, log: Path, settings: Any, *more: str, worker: str = WORKER
) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """The process of a `vllm serve` with these settings, and its URL; it may not have begun."""
    port = free_port()
    named = log.with_suffix(".json")
    named.write_text(settings if isinstance(settings, str) else json.dumps({"no_log": True, **settings}))
    plugin = {"VLLM_PLUGINS": "semgrad_guard", "SEMGRAD_GUARD_SETTINGS": str(named), "VLLM_NO_USAGE_STATS": "1"}
    # What `vllm serve` runs; the wheel for CPUs has another name than its own script looks for.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *SIZE]
    command += ["--port", str(port)]
    command += ["--host", "127.0.0.1", *(more or ("--worker-extension-cls", worker))]
    environment = os.environ | ENVIRONMENT | plugin | {COUNTED: str(log.with_name("counted.json"))}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True) as process,
    ):
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(LIMIT)


@contextmanager
def serving(folder: Path, log: Path, *, worker: str = WORKER, **settings: Any) -> Generator[httpx.Client]:
    """A client of a `vllm serve` that has begun."""
    with started(folder, log, settings, worker=worker) as (process, url):
        for _ in range(1800):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        with httpx.Client(base_url=url, timeout=LIMIT, trust_env=False) as client:
            yield client


@pytest.fixture(scope="module")
def annotated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    log = tmp_path_factory.mktemp("said") / "said.txt"
    with serving(folder, log, mode="annotate", max_tokens=20, threshold=1.0, on_cut="score") as client:
        yield client


def ask(client: httpx.Client, question: str, **given: Any) -> dict[str, Any]:
    body = {"model": "model", "messages": [{"role": "user", "content": question}], **given}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, question: str, **given: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and its chunks."""
    body = {"model": "model", "messages": [{"role": "user", "content": question}], "stream": True, **given}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]  # comments keep it alive
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    return "".join(pieces), chunks


def test_answers_and_scores_are_our_engines(annotated: httpx.Client, own: LanguageModel) -> None:
    """All at once, so that vLLM writes them in one batch, and they are scored in one pass or several."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        found = list(pool.map(lambda question: ask(annotated, question), QUESTIONS))
    estimator = HybridGrad()
    for question, reply in zip(QUESTIONS, found, strict=True):
        alone = own.generate(question, GenerationOptions(max_tokens=20))
        [choice] = reply["choices"]
        assert choice["message"]["content"] == alone.text
        assert choice["finish_reason"] == alone.finish_reason
        assert reply["usage"]["completion_tokens"] == alone.completion_tokens
        assert reply["semgrad_guard"]["uncertainty"] == pytest.approx(estimator(alone.evidence).uncertainty, rel=1e-5)


@pytest.mark.parametrize("estimator", ["max_probability", "hybridgrad"])
def test_scores_are_read_off_vllms_passes(folder: Path, own: LanguageModel, tmp_path: Path, estimator: str) -> None:
    """No layer below the span runs again, all weights are vLLM's, and what no request waits for is let go."""
    log, settings = tmp_path / "said.txt", {"mode": "annotate", "max_tokens": 20, "estimator": estimator}
    with serving(folder, log, worker="tests.vllm.counting.CountingWorker", **settings) as client:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        body = {"model": "model", "messages": messages, "max_tokens": 20, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as one:
            next(one.iter_lines())
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            found = list(pool.map(lambda question: ask(client, question), QUESTIONS))
        several = ask(client, QUESTIONS[1], n=3, temperature=1.0, seed=5)
    assert len(several["choices"]) == 3
    for question, reply in zip(QUESTIONS, found, strict=True):
        evidence = own.generate(question, GenerationOptions(max_tokens=20)).evidence
        expected = {"max_probability": MaxProbability(), "hybridgrad": HybridGrad()}[estimator](evidence).uncertainty
        assert reply["semgrad_guard"]["uncertainty"] == pytest.approx(expected, rel=1e-5)
    counted = json.loads((tmp_path / "counted.json").read_text())
    assert counted["passes"] == 0
    assert counted["shared"] == counted["weights"] >= 27
    assert counted["answers"] == 0


def test_answers_in_a_form(annotated: httpx.Client, own: LanguageModel) -> None:
    found = ask(annotated, QUESTIONS[0], response_format=FORM)
    assert found["choices"][0]["message"]["content"] == formed(own, QUESTIONS[0], 20)
    assert found["semgrad_guard"]["uncertainty"] > 0
    impossible = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    body = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "response_format": impossible}
    assert annotated.post("/v1/chat/completions", json=body).status_code == 400


def test_streams(annotated: httpx.Client, own: LanguageModel) -> None:
    text, chunks = stream(annotated, QUESTIONS[2])
    assert text == own.generate(QUESTIONS[2], GenerationOptions(max_tokens=20)).text
    assert len(chunks) > 3  # in pieces, for nothing is withheld
    assert chunks[-1]["semgrad_guard"]["action"] == "answer"


def test_texts_from_elsewhere(annotated: httpx.Client, own: LanguageModel) -> None:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "text": "It is so. It is not.",
        "by": "sentence",
    }
    found = annotated.post("/v1/score", json=body).json()
    expected = own.score(QUESTIONS[0], "It is so. It is not.").hybridgrad
    assert found["semgrad_guard"]["uncertainty"] == pytest.approx(expected, rel=1e-4)
    assert [segment["text"] for segment in found["segments"]] == ["It is so. ", "It is not."]


def test_nothing_else_writes(annotated: httpx.Client) -> None:
    """No route of vLLM's own that writes is left, and ours refuse what they refuse everywhere."""
    plain = {"model": "x", "prompt": "Hello", "max_tokens": 5}
    chat = {"model": "x", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    for path, body in (
        ("/v1/completions", plain),
        ("/v1/responses", {"model": "x", "input": "Hello"}),
        ("/v1/messages", chat),
        ("/v1/chat/completions/", chat),
        ("/v1/chat/completions/batch", chat),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
        ("/generate", plain),
        ("/invocations", chat),
        ("/v1/embeddings", {"model": "x", "input": "Hello"}),
    ):
        assert annotated.post(path, json=body).status_code in (403, 404, 405, 307), path
    assert "semgrad_guard_" in annotated.get("/v1/semgrad-guard/metrics").text
    assert "vllm:" in annotated.get("/metrics").text
    [model] = annotated.get("/v1/models").json()["data"]
    assert model["semgrad_guard"]["mode"] == "annotate"
    assert annotated.post("/v1/chat/completions", json={**chat, "model": "other"}).status_code == 404
    too_long = {**chat, "model": model["id"], "messages": [{"role": "user", "content": "word " * 400}]}
    assert annotated.post("/v1/chat/completions", json=too_long).status_code == 400


def none_runs(client: httpx.Client) -> bool:
    """Whether vLLM writes nothing."""
    lines = client.get("/metrics").text.splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return bool(running) and all(line.endswith(" 0.0") for line in running)


def test_a_calibration_decides(folder: Path, own: LanguageModel, tmp_path: Path) -> None:
    """One made with vLLM is taken, and withholds; one of our own engine's is refused before anything is answered."""
    questions = [f"What is {n}?" for n in range(60)]
    texts = [
        answer.text.strip() or "nothing" for answer in own.generate_batch(questions, GenerationOptions(max_tokens=6))
    ]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"question": q, "answers": [t]}) for q, t in zip(questions, texts, strict=True))
    )
    files = {name: tmp_path / f"{name}.json" for name in ("vllm", "own")}
    for name, engine in (("vllm", ENGINE[:2]), ("own", ())):
        options = ("--dtype", "float32", "--max-tokens", 6, "--on-cut", "score", "--alpha", 0.9, "--quiet", *engine)
        run = done("calibrate", "--model", folder, "--data", data, "--output", files[name], *options)
        assert run.returncode == 0, run.stdout + run.stderr
    log = tmp_path / "said.txt"
    with serving(folder, log, calibration=str(files["vllm"]), max_tokens=6) as client:
        verdict = ask(client, questions[0])["semgrad_guard"]
        assert verdict["threshold"] == json.loads(files["vllm"].read_text())["threshold"]
        assert verdict["action"] in ("answer", "abstain")
    with started(folder, log, {"calibration": str(files["own"]), "max_tokens": 6}) as (process, _):
        assert process.wait(900) != 0
    assert "fingerprint" in log.read_text()


def test_what_is_withheld_is_nowhere(folder: Path, own: LanguageModel, tmp_path: Path) -> None:
    log = tmp_path / "said.txt"
    with serving(folder, log, threshold=-1.0, max_tokens=20, abstain_message="No.") as client:
        draft = own.generate(QUESTIONS[0], GenerationOptions(max_tokens=20)).text
        body = {"model": "model", "messages": [{"role": "user", "content": QUESTIONS[0]}]}
        whole = client.post("/v1/chat/completions", json=body)
        text, chunks = stream(client, QUESTIONS[0])
        seen = whole.text + str(whole.headers) + json.dumps(chunks)
        seen += client.get("/metrics").text + client.get("/v1/semgrad-guard/metrics").text
        assert whole.json()["choices"][0]["message"]["content"] == text == "No."
        assert draft not in seen
    assert draft not in log.read_text()


def test_thoughts(tmp_path: Path) -> None:
    """A thought ends after its budget, is the context of its answer's score, and is withheld with its draft."""
    folder, log = made("llama", tmp_path / "model", template=THINKING), tmp_path / "said.txt"
    own = LanguageModel.from_pretrained(str(folder), dtype="float32")
    expected = own.generate(QUESTIONS[0], GenerationOptions(max_tokens=30, max_thinking_tokens=9))
    assert expected.reasoning is not None
    settings: Any = {"max_tokens": 30, "max_thinking_tokens": 9, "on_cut": "score"}
    with serving(folder, log, threshold=1e9, **settings) as client:
        reply, (text, _) = ask(client, QUESTIONS[0]), stream(client, QUESTIONS[0])
    with serving(folder, log, threshold=-1.0, **settings) as client:
        held = ask(client, QUESTIONS[0])
    with serving(folder, log, mode="annotate", **settings) as client:
        _, live = stream(client, QUESTIONS[0])
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (expected.text, expected.reasoning.text)
    assert text == expected.text
    thoughts = [chunk["choices"][0]["delta"].get("reasoning_content") for chunk in live if chunk["choices"]]
    assert "".join(filter(None, thoughts)) == expected.reasoning.text
    assert len(list(filter(None, thoughts))) > 2  # as it is written
    value = HybridGrad()(expected.evidence).uncertainty
    assert reply["semgrad_guard"]["uncertainty"] == pytest.approx(value, rel=1e-5)
    assert held["semgrad_guard"]["action"] == "abstain"
    assert expected.reasoning.text[:20] not in json.dumps(held)
    assert not held["choices"][0]["message"].get("reasoning_content")


@pytest.mark.parametrize("on_doubt", ["drop", "stop"])
def test_by_sentence(tmp_path: Path, on_doubt: Any) -> None:
    """Of a real model's answers the sentences that are let through leave as they end, also with several at once.

    Earlier sentences are not read again for them.
    """
    folder, options = folder_of("smollm2"), GenerationOptions(max_tokens=60)
    assert folder is not None
    own = LanguageModel.from_pretrained(str(folder), dtype="float32")
    expected = Guard(own, Policy(threshold=1e9), by="sentence", on_doubt=on_doubt, options=options)(PARAGRAPH)
    values = sorted(sentence.uncertainty or 0.0 for sentence in expected.sentences)
    assert len(values) > 1
    settings: Any = {"threshold": sum(values[-2:]) / 2, "by": "sentence", "on_doubt": on_doubt, "max_tokens": 60}
    decided = Guard(own, Policy(threshold=settings["threshold"]), by="sentence", on_doubt=on_doubt, options=options)
    log = tmp_path / "said.txt"
    with serving(folder, log, worker="tests.vllm.counting.CountingWorker", **settings) as client:
        reply = ask(client, PARAGRAPH)
        with ThreadPoolExecutor(4) as pool:
            streams = list(pool.map(lambda _: stream(client, PARAGRAPH), range(4)))
        gone = {"model": "model", "messages": [{"role": "user", "content": PARAGRAPH}], "stream": True}
        for lines in (1, 4):
            with client.stream("POST", "/v1/chat/completions", json=gone) as one:
                for _, _ in zip(range(lines), one.iter_lines(), strict=False):
                    pass
        after, _ = stream(client, PARAGRAPH)
        until(lambda: none_runs(client))
    assert json.loads((tmp_path / "counted.json").read_text())["again"] == 0  # vLLM's keys and values were kept
    verdict = decided(PARAGRAPH)
    actions = [one.action for one in verdict.sentences]
    assert "deliver" in actions
    assert on_doubt in actions
    found = [reply["semgrad_guard"]["sentences"]]
    assert reply["choices"][0]["message"]["content"] == after == verdict.text
    for text, chunks in streams:
        assert text == verdict.text
        seen = [chunk["semgrad_guard_sentence"] for chunk in chunks if "semgrad_guard_sentence" in chunk]
        left = [one for one in verdict.sentences if one.action == "deliver"]
        assert [one["tokens"] for one in seen] == [one.tokens for one in left][: len(seen)]
        assert len(seen) >= len(left) - 2  # the last ones may come with the end
        found.append(chunks[-1]["semgrad_guard"]["sentences"])
    for sentences in found:  # a stream that is stopped has no more behind it
        assert [one["action"] for one in sentences] == actions[: len(sentences)]
        for one, its in zip(sentences, verdict.sentences, strict=False):
            assert one["uncertainty"] in (None, pytest.approx(its.uncertainty, rel=1e-5))
    for withheld in (one for one in expected.sentences if one.uncertainty == values[-1]):
        assert expected.text[withheld.start : withheld.end].strip() not in json.dumps([c for _, c in streams])


@pytest.mark.parametrize(
    ("settings", "more", "says"),
    [
        ('{"threshold": "much"}', (), "threshold"),
        ({"threshold": 1.0, "model": "other"}, (), "leave model out"),
        ({}, (), "no setting decides which answers"),
        ({"threshold": 1.0}, ("--seed", "0"), "--worker-extension-cls"),
    ],
)
def test_without_the_guard_nothing_is_served(
    folder: Path, tmp_path: Path, settings: Any, more: tuple[str, ...], says: str
) -> None:
    """A plugin that cannot work ends `vllm serve`; it must not continue unguarded."""
    log = tmp_path / "said.txt"
    with started(folder, log, settings, *more) as (process, _):
        assert process.wait(900) != 0
    assert says in log.read_text()
