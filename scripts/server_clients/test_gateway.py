"""A LiteLLM gateway as in examples/litellm: a server that lets all through writes, one that withholds guards it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWER, DRAFT, KNOWN, UNKNOWN

CONFIG = Path(__file__).parents[2] / "examples" / "litellm" / "config.yaml"
START = 300
"""Seconds that the gateway has to import itself."""


@pytest.fixture(scope="module")
def gateway(url: str, live_url: str, key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An OpenAI client of the gateway."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("litellm.proxy.proxy_cli", reason="litellm[proxy] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = f"sk-{secrets.token_hex(24)}"
    config = tmp_path_factory.mktemp("gateway") / "config.yaml"
    config.write_text(CONFIG.read_text().replace("openai/my-model", "openai/pocket"))
    environment = {
        **os.environ,
        "LITELLM_MASTER_KEY": master,
        "SEMGRAD_GUARD_URL": url.removesuffix("/v1"),
        "SEMGRAD_GUARD_API_KEY": key,
        "MODEL_URL": live_url,
        "MODEL_API_KEY": key,
    }
    command = [Path(sys.executable).parent / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    output = (config.parent / "said").open("wb")
    with output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            for _ in range(START):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness"):
                    break
                assert process.poll() is None, Path(output.name).read_text()[-2000:]
                time.sleep(1)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=master, max_retries=0)
        finally:
            process.terminate()


def ask(gateway: Any, question: str, *, stream: bool) -> tuple[str, str]:
    """The answer's text, and all that came."""
    turns: list[Any] = [{"role": "user", "content": question}]
    found = gateway.chat.completions.create(
        model="my-model", messages=turns, stream=stream, logprobs=True, temperature=0
    )
    if not stream:
        return found.choices[0].message.content, found.model_dump_json()
    chunks = list(found)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    return "".join(pieces), str(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_let_through_arrives(gateway: Any, stream: bool) -> None:
    assert ask(gateway, KNOWN, stream=stream)[0] == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_withheld_does_not_and_nothing_of_it(gateway: Any, stream: bool) -> None:
    import openai

    with pytest.raises(openai.APIError, match="is not let through") as caught:
        ask(gateway, UNKNOWN, stream=stream)
    assert DRAFT not in str(caught.value) + str(caught.value.body)


def test_the_hook_itself(url: str, key: str) -> None:
    """litellm's class, called as its proxy calls it."""
    module = pytest.importorskip("litellm.proxy.guardrails.guardrail_hooks.generic_guardrail_api")
    from litellm.exceptions import GuardrailRaisedException

    def judged(question: str, text: str) -> Any:
        hook = module.GenericGuardrailAPI(api_base=url.removesuffix("/v1"), api_key=key, guardrail_name="semgrad-guard")
        inputs: Any = {"texts": [text], "structured_messages": [{"role": "user", "content": question}]}
        return asyncio.run(hook.apply_guardrail(inputs, {}, "response"))

    assert judged(KNOWN, ANSWER)["texts"] == [ANSWER]
    with pytest.raises(GuardrailRaisedException, match="is not let through") as caught:
        judged(UNKNOWN, DRAFT)
    assert DRAFT not in str(vars(caught.value))
