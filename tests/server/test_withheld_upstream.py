"""In front of another server: a withheld answer looks the same whatever that server wrote, counted or was asked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from semgrad_guard import HybridGrad, LanguageModel
from semgrad_guard.guard import Answerer
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.upstream import RemoteServer, RemoteTarget
from tests.engine.chat_templates import template
from tests.random_llama import CALLS

from .conftest import ALL, NONE, Serve, asking
from .others import Other, behind

CHAT = "/v1/chat/completions"
LOOKUP = {"type": "function", "function": {"name": "lookup"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
CALLED: dict[str, Any] = {"text": None, "tool_calls": [CALL], "finish": "tool_calls"}
DRAFTS: list[dict[str, Any]] = [
    {"text": "a written answer"},
    {"text": ""},
    CALLED,
    {"text": "It is.", "reasoning_content": "a thought"},
    {"text": "It", "finish": "length"},
    {"text": "It", "stop_reason": "is"},
]


@pytest.fixture
async def scorer(make_language_model: Callable[..., LanguageModel]) -> AsyncIterator[Scheduler]:
    model = make_language_model(chat_template=template("qwen2.5"), words=CALLS, max_position_embeddings=8192)
    made = Scheduler(Answerer(model, HybridGrad(), served=True))
    yield made
    made.close()


def seen(response: httpx.Response) -> str:
    found = f"{response.status_code} {sorted(response.headers.items())} {response.text}"
    return re.sub(r'chatcmpl-\w+|"created": ?\d+', "", found)


@pytest.mark.parametrize("mode", ["enforce", "raise"])
@pytest.mark.parametrize("tools", [[], [LOOKUP]], ids=["plain", "tools"])
async def test_nothing_tells_how_a_withheld_answer_was_written(
    serve: Serve, scorer: Scheduler, mode: str, tools: list[Any]
) -> None:
    found = set[str]()
    for number, draft in enumerate(DRAFTS):
        for usage in (None, {"prompt_tokens": 7 + number, "completion_tokens": number}):
            async with serve(NONE, mode=mode, **behind(Other(**draft, usage=usage), scorer)) as client:
                found.add(seen(await client.post(CHAT, json=asking(tools=tools))))
    assert len(found) == 1, found


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_an_error_of_an_upstream_may_quote_a_draft(serve: Serve, scorer: Scheduler, status: int) -> None:
    other = Other(status=status, error={"message": "cannot read: Ulaanbaatar", "param": None})
    for mode, delivered in (("enforce", False), ("annotate", True)):
        async with serve(ALL, mode=mode, **behind(other, scorer)) as client:
            response = await client.post(CHAT, json=asking())
        assert (response.status_code, "Ulaanbaatar" in response.text) == (status, delivered)


@pytest.mark.parametrize(
    "cut",
    [
        *({"stop_regex": "a"}, {"extra_body": {"stop": ["a"]}}, {"options": {"num_predict": 2}}, {"max_length": 2}),
        *({"stop": [1]}, {"stop": {}}, {"max_tokens": "3"}, {"max_tokens": 3.5}, {"max_completion_tokens": 0}),
    ],
    ids=str,
)
async def test_cuts_that_this_server_cannot_make_are_refused(
    serve: Serve, scorer: Scheduler, cut: dict[str, Any]
) -> None:
    other = Other()
    async with serve(ALL, **behind(other, scorer)) as client:
        response = await client.post(CHAT, json=asking(**cut))
    assert (response.status_code, other.bodies) == (400, []), response.text
    async with serve(ALL, mode="annotate", **behind(other, scorer)) as client:
        assert (await client.post(CHAT, json=asking(**cut))).status_code == 200


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"functions": [{"name": "f"}]}, "unscored"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "unscored"),
        ({"documents": [{"a": "b"}]}, "unscored"),
        *(({name: True}, "unscored") for name in ("think", "enable_thinking", "add_special_tokens")),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "unscored"),
        ({"functions": [], "chat_template_kwargs": {}, "add_generation_prompt": True, "thinking": None}, "scored"),
    ],
    ids=str,
)
async def test_an_answer_to_a_changed_prompt_has_no_score(
    serve: Serve, scorer: Scheduler, changed: dict[str, Any], status: str
) -> None:
    async with serve(ALL, mode="annotate", **behind(Other(), scorer)) as client:
        found = (await client.post(CHAT, json=asking(**changed))).json()["semgrad_guard"]
    assert (found["status"], found["reason"] is None) == (status, status == "scored")


async def test_a_call_of_the_target_is_an_answer(serve: Serve, scorer: Scheduler) -> None:
    target = RemoteTarget(RemoteServer("http://large/v1", transport=Other(**CALLED)), "large")
    async with serve(NONE, target=target, **behind(Other(), scorer)) as client:
        found = (await client.post(CHAT, json=asking())).json()
    (choice,) = found["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["lookup"]
    assert (found["semgrad_guard"]["action"], choice["finish_reason"]) == ("escalate", "tool_calls")
