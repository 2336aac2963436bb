"""Frameworks for agents and structures, unchanged but for their base_url. Some of them drop what they do not know."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from conftest import ABSTENTION, ANSWER, DRAFT, KNOWN, MODEL, UNKNOWN

BOTH = pytest.mark.parametrize(
    ("question", "text", "action"), [(KNOWN, ANSWER, "answer"), (UNKNOWN, ABSTENTION, "abstain")]
)


@pytest.fixture(scope="session")
def city() -> Any:
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("City", name=(Literal["Tokyo", "Vienna"], ...))


# haystack


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_haystack(url: str, key: str, question: str, text: str, action: str, stream: bool) -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    heard: list[Any] = []
    generator = chat.OpenAIChatGenerator(
        model=MODEL,
        api_base_url=url,
        api_key=Secret.from_token(key),
        max_retries=0,
        streaming_callback=heard.append if stream else None,
    )
    (reply,) = generator.run([ChatMessage.from_user(question)])["replies"]
    assert reply.text == text
    logprobs = reply.meta["logprobs"]
    assert (logprobs[-1] if stream else logprobs)["semgrad_guard"]["action"] == action
    assert DRAFT not in str(reply) + str(heard)


# instructor


def test_instructor(live_url: str, strict_url: str, key: str, city: Any) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": KNOWN}], "response_model": city, "max_retries": 0}

    def client(url: str) -> Any:
        plain = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        return instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions

    found, raw = client(live_url).create_with_completion(**asked)
    assert isinstance(found, city)
    assert raw.choices[0].logprobs.semgrad_guard["action"] == "abstain"
    with pytest.raises(Exception, match=r"(?i)retr|valid|refus"):
        client(strict_url).create(**asked)


# openai-agents


@BOTH
def test_openai_agents(url: str, key: str, question: str, text: str, action: str) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def run(stream: bool) -> Any:
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        model = agents.OpenAIChatCompletionsModel(MODEL, client)
        agent = agents.Agent(name="agent", model=model)
        if not stream:
            return (await agents.Runner.run(agent, question)).final_output
        streamed = agents.Runner.run_streamed(agent, question)
        pieces = [event async for event in streamed.stream_events()]
        assert DRAFT not in str(pieces)
        return streamed.final_output

    assert [asyncio.run(run(stream)) for stream in (False, True)] == [text, text]


# pydantic-ai


@BOTH
def test_pydantic_ai(url: str, key: str, question: str, text: str, action: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> tuple[str, str]:
        agent = pydantic_ai.Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key)))
        whole = await agent.run(question)
        async with agent.run_stream(question) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        assert DRAFT not in str(whole.all_messages()) + str(pieces)
        return whole.output, "".join(pieces)

    assert asyncio.run(run()) == (text, text)


def test_pydantic_ai_reads_structures_and_refusals(live_url: str, strict_url: str, key: str, city: Any) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run(url: str) -> Any:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key))
        return (await pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(city)).run(KNOWN)).output

    assert isinstance(asyncio.run(run(live_url)), city)
    with pytest.raises(Exception, match="I don't know"):
        asyncio.run(run(strict_url))
