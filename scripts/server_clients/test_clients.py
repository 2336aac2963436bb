"""Each client, unchanged but for its base_url: plain and streamed, and the verdict where it survives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BOTH, DRAFT, KNOWN, MODEL, turn

HERE = Path(__file__).parent


# langchain-openai


@pytest.fixture
def chat_openai(url: str, key: str) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=url, api_key=key, model=MODEL, max_retries=0, include_response_headers=True
    )


@BOTH
def test_chat_openai(chat_openai: Any, question: str, text: str, action: str) -> None:
    message = chat_openai.invoke(question)
    assert message.text == text
    assert message.response_metadata["logprobs"]["semgrad_guard"]["action"] == action
    assert message.response_metadata["headers"]["x-semgrad-guard-action"] == action
    assert DRAFT not in str(message)


@BOTH
def test_chat_openai_streamed(chat_openai: Any, question: str, text: str, action: str) -> None:
    whole: Any = None
    for chunk in chat_openai.stream(question):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == text
    assert whole.response_metadata["logprobs"]["semgrad_guard"]["action"] == action
    assert DRAFT not in str(whole)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_chat_openai_with_responses(url: str, key: str, question: str, text: str, action: str, stream: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(base_url=url, api_key=key, model=MODEL, max_retries=0, use_responses_api=True)
    message: Any = None
    for chunk in chat.stream(question) if stream else [chat.invoke(question)]:
        message = chunk if message is None else message + chunk
    assert message.text == text
    assert json.loads(message.response_metadata["metadata"]["semgrad_guard"])["action"] == action
    assert DRAFT not in str(message)


@BOTH
def test_openai_of_langchain(url: str, key: str, question: str, text: str, action: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.OpenAI(base_url=url, api_key=key, model=MODEL, max_retries=0, temperature=0)
    ((found,),) = model.generate([question]).generations
    assert found.text == text
    assert found.generation_info["logprobs"]["semgrad_guard"]["action"] == action


# llama-index OpenAILike


@pytest.fixture(params=[True, False], ids=["chat", "completions"])
def openai_like(url: str, key: str, request: pytest.FixtureRequest) -> Any:
    module = pytest.importorskip("llama_index.llms.openai_like")
    given = {} if not request.param else {"is_chat_model": True}
    return module.OpenAILike(model=MODEL, api_base=url, api_key=key, max_retries=0, temperature=0.0, **given)


@BOTH
def test_openai_like(openai_like: Any, question: str, text: str, action: str) -> None:
    found = openai_like.complete(question)
    assert found.text == text
    assert found.raw.choices[0].logprobs.semgrad_guard["action"] == action
    assert DRAFT not in str(found)


@BOTH
def test_openai_like_streamed(openai_like: Any, question: str, text: str, action: str) -> None:
    pieces = list(openai_like.stream_complete(question))
    assert pieces[-1].text == text
    records = [choice.logprobs for piece in pieces for choice in piece.raw.choices if choice.logprobs]
    assert records[-1].semgrad_guard["action"] == action
    assert DRAFT not in str(pieces)


def test_the_defaults_of_openai_like(url: str, live_url: str, key: str) -> None:
    """It asks for a completion at the temperature .1, which is not the calibration's."""
    module = pytest.importorskip("llama_index.llms.openai_like")
    assert module.OpenAILike(model=MODEL, api_base=live_url, api_key=key, max_retries=0).complete(KNOWN).text
    with pytest.raises(Exception, match="set temperature to 0 or leave it out"):
        module.OpenAILike(model=MODEL, api_base=url, api_key=key, max_retries=0).complete(KNOWN)


# litellm


@BOTH
def test_litellm(url: str, key: str, question: str, text: str, action: str) -> None:
    litellm = pytest.importorskip("litellm")
    request = {"model": f"openai/{MODEL}", "messages": turn(question), "api_base": url, "api_key": key}
    found = litellm.completion(**request)
    assert found.choices[0].message.content == text
    assert found.choices[0].logprobs.semgrad_guard["action"] == action
    assert found.semgrad_guard["action"] == action
    headers = found._hidden_params["additional_headers"]
    assert action in [value for name, value in headers.items() if name.endswith("x-semgrad-guard-action")]
    chunks = list(litellm.completion(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    records = [chunk.choices[0].logprobs for chunk in chunks if getattr(chunk.choices[0], "logprobs", None)]
    assert action in str(records[-1])
    response = litellm.responses(model=f"openai/{MODEL}", input=question, api_base=url, api_key=key)
    assert response.output[0].content[0].text == text
    assert response.semgrad_guard["action"] == action
    assert DRAFT not in str(found) + str(chunks) + str(response)


# curl


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_curl(url: str, key: str, question: str, text: str, action: str, stream: bool) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": MODEL, "messages": turn(question), "stream": stream})
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
    found = subprocess.run(
        [curl, "-sSN", "-D", "-", *headers, f"{url}/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert f"x-semgrad-guard-action: {action}" in found
    assert text in found
    assert DRAFT not in found
    assert found.endswith("data: [DONE]\n\n") == stream


# llm


@pytest.fixture
def llm_home(url: str, tmp_path: Path) -> Path:
    """The settings of `llm`, a program for the command line, with the server as a model of its own."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: guarded\n  model_name: {MODEL}\n  api_base: {url}\n  api_key_name: guarded\n"
    )
    return tmp_path


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_llm(llm_home: Path, key: str, question: str, text: str, action: str, stream: bool) -> None:
    environment = {**os.environ, "LLM_USER_PATH": str(llm_home)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert found.returncode == 0, found.stderr
        return found.stdout

    printed = run("-m", "guarded", "--key", key, question, *([] if stream else ["--no-stream"]))
    logged = json.loads(run("logs", "--json", "-n", "1"))[0]
    assert printed.strip() == logged["response"] == text
    assert DRAFT not in printed + json.dumps(logged)
    if not stream:  # of a stream it keeps the text alone
        assert logged["response_json"]["semgrad_guard"]["action"] == action


# openai-node


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_openai_node(url: str, key: str, question: str, text: str, action: str, stream: bool) -> None:
    node, home = shutil.which("node"), HERE / "node_modules" / "openai"
    if node is None or not home.is_dir():
        pytest.skip("node, or the openai package in scripts/server_clients/node_modules, is not installed")
    found = subprocess.run(
        [node, HERE / "client.mjs", url, key, question, str(int(stream))],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    reply = json.loads(found.stdout)
    assert (reply["text"], reply["record"]["action"], reply["top"]["action"]) == (text, action, action)
    assert DRAFT not in found.stdout
