"""Whatever a client sends, it gets an answer or an error with a name: no bug, no hang."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from semgrad_guard import GenerationOptions
from semgrad_guard.server.protocol import ChatRequest
from semgrad_guard.server.responses import ResponsesRequest
from semgrad_guard.server.text_completions import TextRequest
from tests.steps import LIMIT

from .conftest import ALL, Serve, asking
from .test_other_protocols import CHAT, RESPONSES, TEXT, prompting, responding

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.sampled_from(["role", "type", "content", "name", "parameters", "function", "schema", "text", "arguments"])
WORDS = st.sampled_from(["user", "assistant", "tool", "function", "text", "json_schema", "message", "object", "array"])
NESTED = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.dictionaries(PARTS, inner, max_size=4),
    max_leaves=8,
)
"""Values of the names that the protocols have, in any order."""
PLAIN = st.sampled_from([True, 1, 2, 0.5, "auto", "required", ["a"], "a", [], {}])


def bodies(base: dict[str, Any], kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Requests in which some fields have other values, of any kind."""
    fields = sorted({*kind.model_fields, *ChatRequest.model_fields, "previous_response_id"} - {"model"})
    return st.dictionaries(st.sampled_from(fields), NESTED | PLAIN, max_size=4).map(lambda more: {**base, **more})


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "base", "kind"),
    [(CHAT, asking(), ChatRequest), (RESPONSES, responding(), ResponsesRequest), (TEXT, prompting(), TextRequest)],
)
def test_no_request_is_a_bug(
    serve: Serve, loop: asyncio.AbstractEventLoop, path: str, base: dict[str, Any], kind: type[BaseModel]
) -> None:
    async def one(body: Any) -> None:
        async with serve(ALL, options=GenerationOptions(max_tokens=4)) as client:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=json.dumps(body).encode(), headers=headers, timeout=LIMIT)
            client.service.close()
        assert response.status_code < 500, (body, response.text)
        assert "internal_error" not in response.text, body

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(bodies(base, kind))
    def fuzz(body: Any) -> None:
        loop.run_until_complete(one(body))

    fuzz()
