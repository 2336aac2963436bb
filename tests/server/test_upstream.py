"""In front of another server: what it writes is scored here, what it does wrong is an error with a name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from semgrad_guard import LanguageModel
from semgrad_guard.server.app import make_app
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.service import ServedModel, Service
from semgrad_guard.server.upstream import RemoteServer, RemoteTarget, Upstream
from tests.steps import LIMIT

from .conftest import ALL, NONE, OPTIONS, Serve, asking, bodies, events, text_in

CHAT = "/v1/chat/completions"
Made = Callable[..., ServedModel]


@pytest.fixture
def other(make_served: Made, make_language_model: Callable[..., LanguageModel]) -> tuple[Any, list[dict[str, str]]]:
    """Another server, which lets everything through, and the headers of the requests that reach it."""
    app = make_app(Service([make_served(ALL, mode="annotate", model=make_language_model(seed=1), name="large")]))
    requests: list[dict[str, str]] = []

    async def hearing(scope: Any, receive: Any, send: Any) -> None:
        requests.append({name.decode(): value.decode() for name, value in scope.get("headers", [])})
        await app(scope, receive, send)

    return httpx.ASGITransport(hearing), requests


@pytest.mark.parametrize("stream", [False, True])
async def test_the_upstream_writes_and_this_one_scores(
    serve: Serve,
    other: Any,
    scorer: Scheduler,
    language_model: LanguageModel,
    make_language_model: Callable[..., LanguageModel],
    stream: bool,
) -> None:
    transport, requests = other
    written = make_language_model(seed=1).generate("hello", OPTIONS).text
    expected = language_model.score("hello", written).hybridgrad
    upstream = Upstream(RemoteServer("http://other/v1", api_key="upstream-key", transport=transport), scorer)
    body = asking(stream=stream, user="me") | {"model": "large"}
    for policy, mode, text in (
        (ALL, "enforce", written),
        (NONE, "enforce", "I don't know."),
        (NONE, "annotate", written),
    ):
        async with serve(policy, mode=mode, upstream=upstream, scheduler=scorer, name="large") as client:
            response = await client.post(CHAT, json=body, headers={"authorization": "Bearer client-key"})
            assert response.status_code == 200, response.text
            found = bodies(response)
            shown = text_in(found)
            assert shown == text
            record = found[-1]["choices"][0]["logprobs"]["semgrad_guard"]
            assert record["uncertainty"] == (pytest.approx(expected, rel=1e-6) if text == written else None)
            assert record["details"]["settings"]["served"] is True
            if text != written:
                assert json.dumps(written)[1:-1] not in response.text
    assert {headers["authorization"] for headers in requests} == {"Bearer upstream-key"}


@pytest.mark.parametrize("stream", [False, True])
async def test_escalation(
    serve: Serve, other: Any, make_language_model: Callable[..., LanguageModel], stream: bool
) -> None:
    transport, requests = other
    target = RemoteTarget(RemoteServer("http://other/v1", transport=transport), "large")
    written = make_language_model(seed=1).generate("hello", OPTIONS).text
    async with serve(NONE, target=target) as client:
        response = await client.post(
            CHAT, json=asking(stream=stream, n=None), headers={"authorization": "Bearer client-key"}
        )
    found = bodies(response)
    assert text_in(found) == (written)
    record = found[-1]["choices"][0]["logprobs"]["semgrad_guard"]
    assert (record["action"], record["escalated"]["status"], record["promised"]) == ("escalate", "unscored", False)
    assert record["details"]["scored_tokens"] == 0  # the draft's
    assert not any("authorization" in headers for headers in requests)


@asynccontextmanager
async def answering(respond: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A socket that reads a request and lets `respond` do what it likes."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(length)
        try:
            await respond(writer)
            await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def sends(
    body: str | bytes, *, status: str = "200 OK", length: int | None = None, kind: str = "application/json"
) -> Any:
    data = body.encode() if isinstance(body, str) else body

    async def respond(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data) if length is None else length}"
        writer.write(f"{head}\r\n\r\n".encode() + data)

    return respond


async def hangs(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(600)


def completion(content: Any = "text", **more: Any) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, **more}]})


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def piece(text: str, *, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}}]}


def chunked(*chunks: Any) -> str:
    return "".join(map(event, chunks)) + "data: [DONE]\n\n"


CHUNK = event(piece("part of a secret"))
BEGUN = event({"choices": [{"index": 0, "delta": {}, "finish_reason": None}]})
STREAM = "text/event-stream"
OLD_CALL = {"function_call": {"name": "f", "arguments": "{}"}}
_CALLED = {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
BAD_CALL = json.dumps({"choices": [{"message": _CALLED}]})
FAULTS: list[tuple[str, Any, bool, str]] = [
    ("no json", sends("nonsense"), False, "invalid JSON"),
    ("no object", sends("[]"), False, "not an object"),
    ("no choices", sends("{}"), False, "0 answers"),
    ("too many", sends(json.dumps({"choices": [json.loads(completion())["choices"][0]] * 2})), False, "2 answers"),
    ("no text", sends(completion({"a": 1})), False, "cannot be read"),
    ("half a character", sends(completion("\ud800")), False, "cannot be read"),
    ("lying about its length", sends(completion(), length=10_000), False, "broke off"),
    ("an error", sends("{}", status="500 Oops"), False, "status 500"),
    ("another place", sends("", status="302 Found"), False, "status 302"),
    ("slow", hangs, False, "sent nothing"),
    ("hanging up", sends(b"", status=""), False, "broke off"),
    ("bad call", sends(BAD_CALL), False, "not JSON"),
    ("breaking off in mid-stream", sends(CHUNK, kind=STREAM), True, "broke its stream off"),
    # Servers that give an answer up for another request end its stream with [DONE].
    ("given up", sends(BEGUN + CHUNK + "data: [DONE]\n\n", kind=STREAM), True, "broke its stream off"),
    ("breaking off in mid-chunk", sends(CHUNK, length=9999, kind=STREAM), True, "broke off"),
    ("an error in mid-stream", sends(CHUNK + 'data: {"error": {}}\n\n', kind=STREAM), True, "failed"),
    ("chunks of nonsense", sends('data: {"choices": 3}\n\n', kind=STREAM), True, "cannot be read"),
    ("two answers", sends(chunked(piece("A"), piece("B", index=1)), kind=STREAM), True, "several answers"),
    ("bytes that are no text", sends(chunked(piece("XX")).encode().replace(b"XX", b"\xff")), True, "invalid JSON"),
    ("vLLM's error", sends(CHUNK + event({"object": "error", "message": "a secret"})), True, "failed"),
    ("an event that is an error", sends(CHUNK + 'event: error\ndata: {"message": "a secret"}\n\n'), True, "failed"),
    ("a call of old", sends(chunked({"choices": [{"index": 0, "delta": OLD_CALL}]})), True, "cannot be read"),
    ("a whole call of old", sends(json.dumps({"choices": [{"message": OLD_CALL}]})), False, "cannot be read"),
    ("a number without end", sends(completion().replace('"text"', "1e999")), False, "invalid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("respond", "stream", "says"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
async def test_a_faulty_upstream(serve: Serve, scorer: Scheduler, respond: Any, stream: bool, says: str) -> None:
    async with answering(respond) as url:
        upstream = Upstream(RemoteServer(url, timeout=0.3 if respond is hangs else LIMIT), scorer)
        async with serve(ALL, upstream=upstream, scheduler=scorer) as client:
            response = await client.post(CHAT, json=asking(stream=stream))
            assert response.status_code == 502, response.text
            assert response.json()["error"]["code"] == "upstream_failed"
            assert says in response.json()["error"]["message"]
            assert "secret" not in response.text
        async with serve(ALL, upstream=upstream, scheduler=scorer, on_error="abstain") as client:
            response = await client.post(CHAT, json=asking(stream=stream))
            assert response.status_code == 200
            assert "I don't know." in response.text
            assert response.headers["x-semgrad-guard-action"] == "abstain"
        await upstream.server.close()


FINISHED = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})


async def test_a_stream_that_says_why_it_ends_needs_no_more(serve: Serve, scorer: Scheduler) -> None:
    """`transformers serve` sends no [DONE]; one that is cut off behind the reason has been cut off all the same."""
    for more, status in (({}, 200), ({"length": 9999}, 502)):
        async with answering(sends(CHUNK + FINISHED, kind=STREAM, **more)) as url:
            upstream = Upstream(RemoteServer(url), scorer)
            async with serve(ALL, upstream=upstream, scheduler=scorer) as client:
                response = await client.post(CHAT, json=asking(stream=True))
                assert response.status_code == status
                assert ("part of a secret" in response.text) == (status == 200)
                if status == 200:
                    assert events(response.text)[-1]["choices"][0]["finish_reason"] == "length"
            await upstream.server.close()


async def test_a_faulty_target(serve: Serve) -> None:
    for status, expected in (("500 Oops", 502), ("400 Bad", 400), ("429 Busy", 429), ("401 No", 502)):
        async with answering(sends('{"error": {"message": "key sk-secret"}}', status=status)) as url:
            target = RemoteTarget(RemoteServer(url), "large")
            async with serve(NONE, target=target) as client:
                response = await client.post(CHAT, json=asking())
                assert response.status_code == expected
                assert expected == 400 or "sk-secret" not in response.text
            async with serve(NONE, target=target, on_error="abstain") as client:
                record = (await client.post(CHAT, json=asking())).json()["semgrad_guard"]
                assert record["action"] == "abstain"
                assert record["reason"] == "the answer is not let through"
            await target.server.close()
