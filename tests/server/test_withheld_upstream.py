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
from semgrad_guard.server.upstream import RemoteServer, RemoteTarget, Upstream
from tests.engine.chat_templates import template
from tests.random_llama import CALLS

from .conftest import ALL, NONE, Serve, asking

CHAT = "/v1/chat/completions"
LOOKUP = {"type": "function", "function": {"name": "lookup"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
DRAFTS: dict[str, dict[str, Any]] = {
    "text": {"message": {"content": "a written answer"}},
    "empty": {"message": {"content": ""}},
    "a call": {"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"},
    "reasoning": {"message": {"content": "It is.", "reasoning_content": "a thought"}},
    "cut": {"message": {"content": "It"}, "finish_reason": "length"},
    "a stop reason": {"message": {"content": "It"}, "stop_reason": "is"},
}


class Sending(httpx.AsyncBaseTransport):
    """A server whose answer the test sets; `asked` are the bodies that it got."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, dict[str, Any](), list[httpx.Request]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        return httpx.Response(self.status, json=self.body)


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
    other = Sending()
    upstream = Upstream(RemoteServer("http://other/v1", transport=other), scorer)
    found = set[str]()
    async with serve(NONE, mode=mode, upstream=upstream, scheduler=scorer) as client:
        for number, choice in enumerate(DRAFTS.values()):
            for usage in (None, {"prompt_tokens": 7 + number, "completion_tokens": number}):
                other.body = {"choices": [choice], "usage": usage}
                found.add(seen(await client.post(CHAT, json=asking(tools=tools))))
    assert len(found) == 1, found


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_an_error_of_an_upstream_may_quote_a_draft(serve: Serve, scorer: Scheduler, status: int) -> None:
    other = Sending()
    other.status, other.body = status, {"error": {"message": "cannot read: Ulaanbaatar"}}
    upstream = Upstream(RemoteServer("http://other/v1", transport=other), scorer)
    for mode, delivered in (("enforce", False), ("annotate", True)):
        async with serve(ALL, mode=mode, upstream=upstream, scheduler=scorer) as client:
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
    other = Sending()
    other.body = {"choices": [DRAFTS["text"]]}
    upstream = Upstream(RemoteServer("http://other/v1", transport=other), scorer)
    async with serve(ALL, upstream=upstream, scheduler=scorer) as client:
        response = await client.post(CHAT, json=asking(**cut))
    assert (response.status_code, other.asked) == (400, []), response.text
    async with serve(ALL, mode="annotate", upstream=upstream, scheduler=scorer) as client:
        assert (await client.post(CHAT, json=asking(**cut))).status_code == 200


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"functions": [{"name": "f"}]}, "unscored"),
        *(({name: True}, "unscored") for name in ("think", "enable_thinking", "add_special_tokens")),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "unscored"),
        ({"functions": [], "chat_template_kwargs": {}, "add_generation_prompt": True, "thinking": None}, "scored"),
    ],
    ids=str,
)
async def test_an_answer_to_a_changed_prompt_has_no_score(
    serve: Serve, scorer: Scheduler, changed: dict[str, Any], status: str
) -> None:
    other = Sending()
    other.body = {"choices": [DRAFTS["text"]]}
    upstream = Upstream(RemoteServer("http://other/v1", transport=other), scorer)
    async with serve(ALL, mode="annotate", upstream=upstream, scheduler=scorer) as client:
        found = (await client.post(CHAT, json=asking(**changed))).json()["semgrad_guard"]
    assert (found["status"], found["reason"] is None) == (status, status == "scored")


async def test_a_call_of_the_target_is_an_answer(serve: Serve, scorer: Scheduler) -> None:
    other, large = Sending(), Sending()
    other.body, large.body = ({"choices": [DRAFTS[name]]} for name in ("text", "a call"))
    upstream = Upstream(RemoteServer("http://other/v1", transport=other), scorer)
    target = RemoteTarget(RemoteServer("http://large/v1", transport=large), "large")
    async with serve(NONE, upstream=upstream, scheduler=scorer, target=target) as client:
        found = (await client.post(CHAT, json=asking())).json()
    (choice,) = found["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["lookup"]
    assert (found["semgrad_guard"]["action"], choice["finish_reason"]) == ("escalate", "tool_calls")
