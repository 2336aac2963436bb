"""Frameworks for agents and structures, unchanged but for their base_url. Some of them drop unknown fields."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BOTH, DRAFT, KNOWN, MODEL

# haystack


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_haystack(url: str, key: str, question: str, text: str, action: str, stream: bool) -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    pieces: list[Any] = []
    generator = chat.OpenAIChatGenerator(
        model=MODEL,
        api_base_url=url,
        api_key=Secret.from_token(key),
        max_retries=0,
        streaming_callback=pieces.append if stream else None,
    )
    (reply,) = generator.run([ChatMessage.from_user(question)])["replies"]
    assert reply.text == text
    logprobs = reply.meta["logprobs"]
    assert (logprobs[-1] if stream else logprobs)["semgrad_guard"]["action"] == action
    assert DRAFT not in str(reply) + str(pieces)


# instructor


def test_instructor(live_url: str, strict_url: str, key: str, city: Any) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": KNOWN}],
        "response_model": city,
        "max_retries": 0,
    }

    def client(url: str) -> Any:
        plain = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        return instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions

    found, raw = client(live_url).create_with_completion(**request)
    assert isinstance(found, city)
    assert raw.choices[0].logprobs.semgrad_guard["action"] == "abstain"
    with pytest.raises(Exception, match=r"(?i)retr|valid|refus"):
        client(strict_url).create(**request)
