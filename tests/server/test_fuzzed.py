"""Whatever a client sends, it gets an answer or an error with a name: no bug, no hang."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions
from tests.steps import LIMIT

from .conftest import ALL, Serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FUNCTION = st.fixed_dictionaries({"name": st.just("f")}, optional={"parameters": JSON, "strict": JSON})
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": JSON})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8) | JSON},
    optional={"name": JSON, "tool_calls": JSON, "tool_call_id": JSON, "refusal": JSON},
) | st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PART, max_size=2)})
SCHEMA = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "array", "string", "nothing"])},
    optional={"properties": JSON, "items": JSON, "pattern": st.text(max_size=6), "enum": JSON, "$ref": JSON},
)
FORMAT = JSON | st.builds(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, SCHEMA | JSON
)
BODY = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(MESSAGE, min_size=1, max_size=3) | JSON},
    optional={
        "stream": st.booleans() | JSON,
        "n": st.integers(1, 3) | JSON,
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=3) | JSON,
        "seed": st.integers(-(2**64), 2**64) | JSON,
        "temperature": st.floats(0, 2) | JSON,
        "top_p": st.floats(0, 1) | JSON,
        "top_k": st.integers(0, 10**6) | JSON,
        "logprobs": st.booleans() | JSON,
        "top_logprobs": st.integers(0, 20) | JSON,
        "max_tokens": st.integers(1, 4) | JSON,
        "tools": JSON | st.lists(st.builds(lambda f: {"type": "function", "function": f}, FUNCTION), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required", "f"]) | JSON,
        "response_format": FORMAT,
        "stream_options": JSON,
        "semgrad_guard": JSON,
    },
)

ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | JSON,
        "role": st.sampled_from(["user", "assistant"]) | JSON,
        "content": st.text(max_size=8) | st.lists(PART, max_size=2) | JSON,
        "call_id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
    },
)
RESPONSES = st.fixed_dictionaries(
    {"model": st.just("tiny"), "input": st.text(max_size=8) | st.lists(ITEM, max_size=3) | JSON},
    optional={
        "stream": st.booleans() | JSON,
        "instructions": JSON,
        "tools": JSON | st.lists(st.builds(lambda f: {"type": "function", **f}, FUNCTION), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
        "text": JSON | st.builds(lambda schema: {"format": {"type": "json_schema", "schema": schema}}, SCHEMA | JSON),
        "reasoning": JSON,
        "include": JSON | st.just(["message.output_text.logprobs"]),
        "top_logprobs": st.integers(0, 20) | JSON,
        "metadata": JSON,
        "previous_response_id": JSON,
    },
)
PROMPT = st.fixed_dictionaries(
    {"model": st.just("tiny"), "prompt": st.text(max_size=8) | st.lists(st.text(max_size=4), max_size=3) | JSON},
    optional={"stream": st.booleans() | JSON, "logprobs": st.integers(0, 20) | JSON, "n": JSON, "echo": JSON},
)


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "bodies"), [("chat/completions", BODY), ("responses", RESPONSES), ("completions", PROMPT)]
)
def test_no_request_is_a_bug(serve: Serve, loop: asyncio.AbstractEventLoop, path: str, bodies: Any) -> None:
    async def one(body: Any) -> None:
        async with serve(ALL, options=GenerationOptions(max_tokens=4)) as client:
            sent = json.dumps(body).encode()
            response = await client.post(
                f"/v1/{path}", content=sent, headers={"content-type": "application/json"}, timeout=LIMIT
            )
            client.service.close()
        assert response.status_code < 500, (body, response.text)
        assert "internal_error" not in response.text, body

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(bodies)
    def fuzz(body: Any) -> None:
        loop.run_until_complete(one(body))

    fuzz()
