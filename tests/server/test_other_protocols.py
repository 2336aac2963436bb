"""/v1/completions and /v1/responses: chat completions in other words, with the same decisions and the same limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semgrad_guard.server.scheduler import Scheduler
from tests.thinking import ANSWERS

from .conftest import ALL, Serve
from .others import Other, behind

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUESTION = next(iter(ANSWERS))


def prompting(prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **more}


def responding(given: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": given, **more}


def typed(text: str) -> list[dict[str, Any]]:
    """The events of a streamed response, which are named and numbered."""
    found = list[dict[str, Any]]()
    for event in text.strip().split("\n\n"):
        name, _, data = event.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


FUNCTION = {"name": "paint", "parameters": {"type": "object", "properties": {"colour": {"const": "red"}}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": '{"colour": "red"}'}
CONVERSATION = [
    {"role": "user", "content": [{"type": "input_text", "text": "Paint it."}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "semgrad_guard": {},
        "content": [{"type": "output_text", "text": "I will.", "annotations": []}],
    },
    {**CALL, "id": "fc_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "painted"},
    {"type": "message", "role": "developer", "content": "Be short."},
]  # fmt: skip
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_translated(serve: Serve, scorer: Scheduler, stream: bool) -> None:
    called = {"id": "c2", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    other = Other("Yes.", reasoning_content="hm", tool_calls=[called])
    body = responding(
        CONVERSATION,
        instructions="Help.",
        tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice={"type": "function", "name": "paint"},
        text={"format": {"type": "json_schema", "name": "it", "schema": {"type": "object"}}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        stream=stream,
    )
    async with serve(ALL, mode="annotate", **behind(other, scorer)) as client:
        response = await client.post(RESPONSES, json=body)
        pictured = await client.post(RESPONSES, json=responding([{"role": "user", "content": [PICTURE]}]))
    sent = other.bodies[0]
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    assert sent["messages"] == [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": [{"type": "text", "text": "Paint it."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I will."}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "painted"},
        {"role": "developer", "content": "Be short."},
    ]
    assert sent["tools"] == [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "paint"}}
    schema = {"name": "it", "schema": {"type": "object"}}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert (sent["reasoning_effort"], sent["verbosity"], "text" in sent) == ("low", "low", False)
    found = typed(response.text) if stream else [{"response": response.json()}]
    reasoning, message, made = found[-1]["response"]["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert (message["content"][0]["text"], made["call_id"], made["name"]) == ("Yes.", "c2", "paint")
    assert json.loads(made["arguments"]) == {"colour": "red"}
    assert made["semgrad_guard"]["status"] == "unscored"
    if stream:
        done = [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"]
        assert done == ["reasoning", "message", "function_call"]
    assert other.bodies[1]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": PICTURE["image_url"], "detail": "low"}}
    ]
    assert pictured.json()["semgrad_guard"]["status"] == "unscored"
    scorer.close()
