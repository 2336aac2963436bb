"""Tools on our own engine: calls in OpenAI's form, forced, free, streamed, told of in histories, and withheld."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, LanguageModel, Message, ToolCall
from tests.engine.chat_templates import template
from tests.pairwise import in_turn
from tests.random_llama import CALLS

from .conftest import ALL, NONE, Serve, asking, events

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "twice": {"type": "boolean"}},
    "required": ["colour", "twice"],
}
PAINT = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": PARAMETERS}}
WAIT = {"type": "function", "function": {"name": "wait"}}
TEMPLATES = ("qwen2.5", "mistral-nemo", "llama-3.1-tools")
FORCED: dict[str, Any] = {"tools": [PAINT], "tool_choice": "required"}

Make = Callable[[str], LanguageModel]


@pytest.fixture(scope="module")
def tooled(make_language_model: Callable[..., LanguageModel]) -> Make:
    """The random model under a template that knows tools."""
    made: dict[str, LanguageModel] = {}

    def make(name: str) -> LanguageModel:
        if name not in made:
            made[name] = make_language_model(chat_template=template(name), words=CALLS, max_position_embeddings=8192)
        return made[name]

    return make


def served(model: LanguageModel, **given: Any) -> dict[str, Any]:
    return {"model": model, "options": GenerationOptions(max_tokens=150), **given}


def joined(chunks: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]], str | None]:
    """A stream's text, its calls put together by their index, and why it ended."""
    text, calls, finish = "", dict[int, dict[str, Any]](), None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or ():
            at = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
            at["id"] += piece.get("id") or ""
            at["name"] += piece["function"].get("name") or ""
            at["arguments"] += piece["function"].get("arguments") or ""
        finish = choice["finish_reason"] or finish
    return text, list(calls.values()), finish


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_call_in_openais_form(serve: Serve, tooled: Make, name: str) -> None:
    chosen = {"type": "function", "function": {"name": "paint"}}
    for mode in ("enforce", "annotate"):
        async with serve(ALL, mode=mode, **served(tooled(name))) as client:
            body = asking(tools=[WAIT, PAINT], tool_choice=chosen)
            whole = await client.post(CHAT, json=body)
            chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
        (choice,) = whole.json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        assert (call["type"], call["function"]["name"]) == ("function", "paint")
        assert call["id"]
        found = json.loads(call["function"]["arguments"])
        assert set(found) == {"colour", "twice"}
        assert found["colour"] in ("red", "green")
        assert isinstance(found["twice"], bool)
        assert choice["logprobs"]["semgrad_guard"]["uncertainty"] is not None
        text, (streamed,), finish = joined(chunks)
        assert (text, finish) == ("", "tool_calls")
        assert (streamed["name"], json.loads(streamed["arguments"])) == ("paint", found)
        assert streamed["id"]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_call_is_answered_in_the_next_turn(serve: Serve, tooled: Make, name: str) -> None:
    model = tooled(name)
    async with serve(ALL, **served(model)) as client:
        own = (await client.post(CHAT, json=asking(**FORCED))).json()["choices"][0]["message"]
        elsewhere = {"id": "call_of_another_server", "index": 0, "extra_content": {"signature": "x"}}
        for first in (own, {**own, "tool_calls": [own["tool_calls"][0] | elsewhere]}):
            (call,) = first["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "painted"}
            history = [{"role": "user", "content": "hello"}, first, result]
            body = {**asking(max_tokens=4, tools=[PAINT]), "messages": history}
            for stream in (True, False):
                response = await client.post(CHAT, json={**body, "stream": stream})
                assert response.status_code == 200, response.text
            short = call["id"] if re.fullmatch("[A-Za-z0-9]{9}", call["id"]) else "a" * 9
            messages = (
                Message("user", "hello"),
                Message("assistant", "", (ToolCall("paint", json.loads(call["function"]["arguments"]), short),)),
                Message("tool", "painted", tool_call_id=short),
            )
            expected = model.render(messages, tools=[PAINT])
            assert response.json()["usage"]["prompt_tokens"] == len(expected.ids)
            assert "painted" in expected.text


async def test_which_tools_the_model_is_told_of(serve: Serve, tooled: Make) -> None:
    async with serve(ALL, **served(tooled("qwen2.5"))) as client:

        async def cost(**more: Any) -> int:
            response = await client.post(CHAT, json=asking(max_tokens=2, **more))
            assert response.status_code == 200, response.text
            return response.json()["usage"]["prompt_tokens"]

        bare = await cost()
        assert await cost(tools=[PAINT], tool_choice="none") == bare
        assert await cost(tools=[]) == bare
        tokens = await cost(tools=[PAINT])
        assert tokens == await cost(tools=[PAINT], tool_choice="auto", parallel_tool_calls=True)
        assert tokens > bare + 100
        for wrong in ("pint", {"type": "function", "function": {"name": "pint"}}, {"type": "function"}, {}, "required"):
            tools = [] if wrong == "required" else [PAINT]
            response = await client.post(CHAT, json=asking(tools=tools, tool_choice=wrong))
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request"), wrong


async def test_a_free_answer_beside_tools_is_live(serve: Serve, tooled: Make) -> None:
    async with serve(NONE, mode="annotate", **served(tooled("qwen2.5"))) as client:
        body = asking(tools=[PAINT], max_tokens=30)
        whole = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
        chunks = events((await client.post(CHAT, json={**body, "stream": True})).text)
    assert "tool_calls" not in whole
    assert joined(chunks)[:2] == (whole["content"], [])
    assert sum(bool(c["delta"].get("content")) for chunk in chunks for c in chunk["choices"]) > 3


async def test_a_call_that_was_cut_is_delivered_as_the_text_it_is(serve: Serve, tooled: Make) -> None:
    async with serve(ALL, mode="annotate", **served(tooled("qwen2.5"))) as client:
        body = asking(max_tokens=30, **FORCED)
        (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
        text, calls, finish = joined(events((await client.post(CHAT, json={**body, "stream": True})).text))
    assert choice["message"]["content"].startswith('<tool_call>\n{"name": "paint"')
    assert "tool_calls" not in choice["message"]
    assert (text, calls, finish) == (choice["message"]["content"], [], "length")
    assert choice["finish_reason"] == "length"


@in_turn(mode=["enforce", "raise"], count=[1, 2])
async def test_a_withheld_call_leaves_no_trace(serve: Serve, tooled: Make, mode: str, count: int) -> None:
    schema = {"type": "object", "properties": {"colour": {"const": "burgundy-4711"}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    body = asking(tools=[tool], tool_choice="required", n=count, logprobs=True, top_logprobs=2)
    for policy in (ALL, NONE):
        async with serve(policy, mode=mode, **served(tooled("qwen2.5"))) as client:
            for stream in (False, True):
                response = await client.post(CHAT, json={**body, "stream": stream})
                sent = response.text + str(response.headers) + (await client.get("/metrics")).text
                if policy is ALL:  # the search would find it
                    assert "burgundy-4711" in sent
                    continue
                assert "burgundy" not in sent
                assert "tool_call" not in sent
                if mode == "raise":
                    assert response.status_code == 422
                    continue
                last = [event for event in events(response.text) if event["choices"]][-1] if stream else response.json()
                assert last["choices"][-1]["finish_reason"] == "stop"
