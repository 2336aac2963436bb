"""Frameworks that need openai 3, which others exclude."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import BOTH, DRAFT, KNOWN, MODEL

# openai-agents


@BOTH
@pytest.mark.parametrize("route", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])  # the first is its default
def test_openai_agents(url: str, key: str, question: str, text: str, action: str, route: str) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def run(stream: bool) -> Any:
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        model = getattr(agents, route)(MODEL, client)
        agent = agents.Agent(name="agent", model=model)
        if not stream:
            found = await agents.Runner.run(agent, question)
            if route == "OpenAIResponsesModel":
                assert found.raw_responses[-1].output[0].semgrad_guard["action"] == action
            return found.final_output
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
