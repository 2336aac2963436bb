"""`semgrad-guard` with `--engine vllm`: asked, calibrated and served, as it is run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, LanguageModel, Message
from semgrad_guard.adapters.calls import AnswerForm
from tests.steps import LIMIT

from .conftest import ENVIRONMENT, made

pytestmark = pytest.mark.heavy
pytest.importorskip("vllm", reason="vLLM is not installed here: make check-vllm has an environment for it")

ENGINE = ("--engine", 'vllm={"max_model_len": 256, "max_num_seqs": 8}', "--dtype", "float32")
QUESTIONS = [f"What is {a} of {b}?" for a in ("a metal", "the river") for b in ("glass", "Mongolia", "1815")]


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 23, 456]}},
    "required": ["ok", "n"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}


def formed(own: LanguageModel, question: str, tokens: int) -> str:
    """What our engine answers in that form."""
    form = AnswerForm.of({"response_format": FORM})
    conversation = form.instructed((Message(role="user", content=question),))
    return own.generate(conversation, GenerationOptions(max_tokens=tokens, grammar=form.grammar(own))).text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("served") / "model")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "semgrad_guard.cli", *map(str, arguments)]


def done(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=os.environ | ENVIRONMENT)


@contextmanager
def serving(folder: Path, *arguments: object) -> Generator[str]:
    """The URL of a server that ends with the block, and well."""
    settings = folder / "settings.json"
    settings.write_text('{"no_log": true}')
    with subprocess.Popen(
        command("serve", *arguments, "--port", 0, "--settings", settings, "--quiet"),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving"), line
        yield line.split()[-1]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0


def answered(url: str, questions: Sequence[str], **given: Any) -> list[dict[str, Any]]:
    """The server's replies to all of them, sent at once."""

    def ask(question: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": question}], "model": "model", **given}
        response = httpx.post(f"{url}/chat/completions", json=body, timeout=LIMIT, trust_env=False)
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))


def test_requests_share_vllms_batch(folder: Path) -> None:
    own = LanguageModel.from_pretrained(str(folder), dtype="float32")
    with serving(folder.parent, "--model", folder, "--mode", "annotate", *ENGINE) as url:
        [model] = httpx.get(f"{url}/models", trust_env=False, timeout=LIMIT).json()["data"]
        found = answered(url, QUESTIONS, model=model["id"], max_tokens=20)
        for question, reply in zip(QUESTIONS, found, strict=True):
            alone = own.generate(question, GenerationOptions(max_tokens=20))
            assert reply["choices"][0]["message"]["content"] == alone.text
            timed = alone.evidence.gradients()
            assert timed is not None
            assert reply["semgrad_guard"]["uncertainty"] == pytest.approx(timed.scores.hybridgrad, rel=1e-4)
        form = answered(url, QUESTIONS, model=model["id"], max_tokens=40, response_format=FORM)
        for question, reply in zip(QUESTIONS, form, strict=True):
            text = reply["choices"][0]["message"]["content"]
            assert text == formed(own, question, 40)
            assert set(json.loads(text)) == {"ok", "n"}


def test_a_calibration_is_one_engines(folder: Path, tmp_path: Path) -> None:
    """Made with vLLM, it decides about vLLM's answers, and is refused where transformers writes."""
    data, calibration, band = (tmp_path / name for name in ("data.jsonl", "calibration.json", "band.json"))
    own = LanguageModel.from_pretrained(str(folder), dtype="float32")
    questions = [f"What is {n}?" for n in range(60)]
    texts = [
        answer.text.strip() or "nothing" for answer in own.generate_batch(questions, GenerationOptions(max_tokens=6))
    ]
    rows = [{"question": question, "answers": [text]} for question, text in zip(questions, texts, strict=True)]
    data.write_text("\n".join(map(json.dumps, rows)))
    options = ("--model", folder, "--max-tokens", 6, "--dtype", "float32")
    calibrate = ("calibrate", "--data", data, "--alpha", 0.9, "--on-cut", "score", *options, "--quiet", "--output")
    run = done(*calibrate, calibration, *ENGINE[:2])
    assert run.returncode == 0, run.stdout + run.stderr
    gate = ("gate", "--data", data, *options, "--calibration", calibration, "--band", band, "--record")
    gated = done(*gate, *ENGINE[:2])
    assert gated.returncode == 0, gated.stdout + gated.stderr
    other = done("ask", "What is 7?", *options, "--json", "--calibration", calibration)
    assert other.returncode not in (0, 3)
    assert "fingerprint" in other.stderr
    refused = done(*calibrate, band, *ENGINE[:2], "--device", "cpu")
    assert "--engine vllm takes neither --device" in " ".join(refused.stderr.replace("│", " ").split())
