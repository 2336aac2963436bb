"""`on_doubt="escalate"` in a server: another server's answer follows the sentences before the doubtful one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, LanguageModel, Policy
from semgrad_guard.server.upstream import RemoteServer, RemoteTarget
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import PIECES, FixedModel

from .conftest import NONE, Serve, asking, events
from .test_by_sentence import scores_of

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

CHAT, REPLY = "/v1/chat/completions", "Ask a cook."
FINISHED, ENDED = f"{PIECES[0]}\n\n{REPLY}", f"{PIECES[0]}{CLOSING_LINE}"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: asking(),
    "/v1/completions": {"model": "tiny", "prompt": "hello"},
    "/v1/responses": {"model": "tiny", "input": "hello"},
}


class Target:
    """Another server, which keeps the requests that it gets."""

    def __init__(self, reply: str = REPLY) -> None:
        self.reply, self.requests = reply, list[dict[str, Any]]()
        self.target = RemoteTarget(
            RemoteServer("http://other/v1", transport=httpx.MockTransport(self._answer)), "large"
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        message = {"role": "assistant", "content": self.reply, "reasoning_content": "The user is hungry."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> LanguageModel:
    return FixedModel.like(language_model)


@pytest.fixture(scope="module")
def between(fixed: LanguageModel) -> Policy:
    """A threshold that lets the first sentence through, and not the second one."""
    first, second, _ = scores_of(fixed)
    assert first < second
    return Policy(threshold=(first + second) / 2)


def text_of(path: str, response: httpx.Response, *, stream: bool) -> str:
    """The text of a response of this route."""
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        if path == "/v1/responses":
            (message,) = body["output"]
            return message["content"][0]["text"]
        return body["choices"][0].get("text") or body["choices"][0]["message"]["content"]
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    found = list(map(json.loads, lines))
    if path == "/v1/responses":
        return "".join(event["delta"] for event in found if event["type"].endswith("output_text.delta"))
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_the_target_finishes(
    serve: Serve, fixed: LanguageModel, between: Policy, tmp_path: Path, path: str, stream: bool
) -> None:
    other = Target()
    given = {"model": fixed, "by_sentence": "escalate", "target": other.target}
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        async with serve(between, **given, service={"log": log}) as client:
            response = await client.post(path, json={**BODIES[path], "stream": stream})
        log.flush()
        [(row, _)] = log.database.decisions(limit=9)
    assert text_of(path, response, stream=stream) == row.delivered == FINISHED
    assert (row.action, [one.action for one in row.sentences or ()][:2]) == ("escalate", ["deliver", "escalate"])
    assert [request["messages"] for request in other.requests] == [asking()["messages"]]  # and no draft
    assert not [word for word in ("Milk", "hungry") if word in response.text]


async def test_the_record_is_that_of_both(serve: Serve, fixed: LanguageModel, between: Policy) -> None:
    async with serve(between, model=fixed, by_sentence="escalate", target=Target().target) as client:
        whole = (await client.post(CHAT, json=asking())).json()
        stream = (await client.post(CHAT, json=asking(stream=True, stream_options={"include_usage": True}))).text
        both = (await client.post(CHAT, json=asking(n=2))).json()
    record, chunks = whole["semgrad_guard"], events(stream)
    assert (record["action"], record["promised"], record["uncertainty"]) == ("escalate", False, None)
    assert [one["action"] for one in record["sentences"]] == ["deliver", "escalate"]
    assert (record["escalated"]["status"], record["sentences"][0]["end"]) == ("unscored", len(PIECES[0]))
    deltas = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert list(filter(None, deltas)) == [PIECES[0], f"\n\n{REPLY}"]
    streamed = chunks[-2]["choices"][0]["logprobs"]["semgrad_guard"]
    assert streamed["sentences"] == record["sentences"][:2]  # the model was stopped
    assert (streamed["digest"], streamed["action"]) == (record["digest"], "escalate")
    tokens = record["sentences"][0]["tokens"] + 5
    assert (whole["usage"]["completion_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (tokens, tokens)
    assert [choice["message"]["content"] for choice in both["choices"]] == [FINISHED] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_cuts_are_those_of_both_together(
    serve: Serve, fixed: LanguageModel, between: Policy, stream: bool
) -> None:
    other = Target()
    given = {"model": fixed, "by_sentence": "escalate", "options": GenerationOptions(max_tokens=64)}
    async with serve(between, **given, target=other.target) as client:

        async def text(**cuts: Any) -> str:
            other.requests.clear()
            response = await client.post(CHAT, json=asking(stream=stream, **cuts))
            return text_of(CHAT, response, stream=stream)

        assert await text(max_tokens=60) == FINISHED
        own = 60 - other.requests[0]["max_tokens"]
        assert 0 < own < 20
        assert (await text(max_completion_tokens=own + 1), other.requests[0]["max_completion_tokens"]) == (FINISHED, 1)
        for stop, due in (("\n\n", PIECES[0]), (" \n", PIECES[0][:-1]), ("zz", FINISHED), ("\nAsk", f"{PIECES[0]}\n")):
            assert await text(stop=[stop]) == due
            assert len(other.requests) == 1
        for cuts, due in (
            ({"stop": "is"}, "Tea "),
            ({"max_tokens": own}, ENDED),
            ({"stop": CLOSING_LINE[2:5], "max_tokens": own}, ENDED[: ENDED.find(CLOSING_LINE[2:5])]),
        ):
            assert await text(**cuts) == due
            assert other.requests == []
        short = await text(max_tokens=own - 1)
        assert (PIECES[0].startswith(short), short != PIECES[0], other.requests) == (True, True, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_reply_the_answer_ends(
    serve: Serve, fixed: LanguageModel, between: Policy, stream: bool
) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    failing = RemoteTarget(RemoteServer("http://other/v1", transport=httpx.MockTransport(fail)), "large")
    for target in (failing, Target("  ").target):
        given = {"model": fixed, "by_sentence": "escalate", "target": target, "on_error": "abstain"}
        async with serve(between, **given) as client:
            response = await client.post(CHAT, json=asking(stream=stream))
        assert text_of(CHAT, response, stream=stream) == ENDED
    async with serve(NONE, model=fixed, by_sentence="escalate", target=Target().target) as client:
        assert text_of(CHAT, await client.post(CHAT, json=asking(stream=stream)), stream=stream) == REPLY
