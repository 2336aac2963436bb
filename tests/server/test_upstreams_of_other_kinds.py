"""Upstreams with an accent in OpenAI's protocol: what they mean is delivered, what cannot be meant is an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from semgrad_guard import HybridGrad, LanguageModel, Message, Policy
from semgrad_guard.guard import Answerer
from semgrad_guard.server.remote import events as events_of
from semgrad_guard.server.scheduler import ForeignText, Scheduler
from semgrad_guard.server.upstream import RemoteServer, Upstream
from tests.ports import free_port
from tests.steps import LIMIT

from .conftest import ALL, NONE, Serve, asking, events, text_in
from .others import Other, behind
from .test_upstream import CHAT, answering, sends

ANY = Policy(threshold=1e9, on_unscored="answer", on_cut="score")
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
DONE = "data: [DONE]\n\n"


def event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def piece(index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def stream(*chunks: Any, end: str = DONE) -> str:
    return "".join(map(event, (*chunks, END))) + end


def call(of: str | None, name: str | None, arguments: str | None, **more: Any) -> dict[str, Any]:
    function = None if name is arguments is None else {"name": name, "arguments": arguments}
    return {"id": of, "type": "function", "function": function, **more}


USUAL = [piece(role="assistant", content=""), piece(content="Vien"), piece(content="na")]
CHARSET = "text/event-stream; charset=iso-8859-1"
STREAMED: dict[str, tuple[str | bytes, str]] = {
    "other ends of lines in JSON": (stream(piece(content="a\u2028b\x85c\x0bd")), "a\u2028b\x85c\x0bd"),
    "a charset that is not so": (stream(piece(content="Köln 🙂")), "Köln 🙂"),
    "CR LF": (stream(*USUAL).replace("\n", "\r\n"), "Vienna"),
    "a byte order mark": (b"\xef\xbb\xbf" + stream(*USUAL).encode(), "Vienna"),
    "comments and other fields": (": hello\n\nid: 1\nretry: 5\n\n" + stream(*USUAL), "Vienna"),
    "an event in several lines": (
        "".join(f"data: {line}\n" for line in json.dumps(piece(content="Vienna"), indent=1).split("\n"))
        + f"\n{event(END)}",
        "Vienna",
    ),
    "no error": (stream(*({**event, "error": None} for event in USUAL)), "Vienna"),
    "nothing": (stream(*USUAL, {"choices": None, "usage": None}, end="data:\n\n"), "Vienna"),
    "no delta": (stream(*USUAL, {"choices": [{"index": 0, "delta": None, "finish_reason": None}]}), "Vienna"),
    "Azure": (
        stream({"choices": [], "prompt_filter_results": [{}]}, *USUAL, {"choices": [{"content_filter_offsets": {}}]}),
        "Vienna",
    ),
    "thoughts": (stream(piece(reasoning_content="hm", content=None), *USUAL), "Vienna"),
}
F, G = ("f", {"a": 1}), ("g", {})
CALLS: dict[str, tuple[list[Any], list[Any]]] = {
    "no numbers": ([[call("a", "f", '{"a": 1}')], [call("b", "g", "{}")]], [F, G]),
    "no numbers in one chunk": ([[call("a", "f", '{"a": 1}', index=None), call("b", "g", "{}", index=None)]], [F, G]),
    "one number for all": ([[call("a", "f", '{"a": 1}', index=0)], [call("b", "g", "{}", index=0)]], [F, G]),
    "pieces": (
        [[call("a", "f", "", index=0)], [call(None, None, None, index=0)], [call(None, None, '{"a": 1}', index=0)]],
        [F],
    ),
    "pieces of two": (
        [
            [call("a", "f", "", index=0), call("b", "g", "{", index=1)],
            [call("", None, '{"a": 1}', index=0), call("", None, "}", index=1)],
        ],
        [F, G],
    ),
}


@pytest.mark.parametrize("name", STREAMED)
async def test_what_a_stream_means_is_delivered(serve: Serve, scorer: Scheduler, name: str) -> None:
    sent, text = STREAMED[name]
    async with answering(sends(sent, kind=CHARSET)) as url:
        upstream = Upstream(RemoteServer(url), scorer)
        async with serve(ANY, upstream=upstream, scheduler=scorer) as client:
            response = await client.post(CHAT, json=asking(stream=True))
        await upstream.server.close()
    assert response.status_code == 200, response.text
    assert text_in(events(response.text)) == text


@pytest.mark.parametrize("name", CALLS)
async def test_calls_are_put_together(serve: Serve, scorer: Scheduler, name: str) -> None:
    sent, expected = CALLS[name]
    async with answering(sends(stream(*(piece(tool_calls=calls) for calls in sent)))) as url:
        upstream = Upstream(RemoteServer(url), scorer)
        async with serve(ANY, upstream=upstream, scheduler=scorer) as client:
            found = events((await client.post(CHAT, json=asking(stream=True))).text)
        await upstream.server.close()
    calls = [call["function"] for e in found for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    text = "\ufeffdata: a\n\r\ndata:b\r\ndata:  c\r\n\r\nevent: error\ndata: 🙂\u2028\n\n: x\n\ndata\n\ndata: end"
    data = text.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]
            yield b""

    found = [(kind.decode(), value.decode()) async for kind, value in events_of(pieces())]
    assert found == [("", "a"), ("", "b\n c"), ("error", "🙂\u2028"), ("", "end")]


async def test_a_line_without_end_is_not_kept(serve: Serve, scorer: Scheduler) -> None:
    sent = 0

    async def endless(writer: Any) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
        while True:
            writer.write(b"x" * 2**16)
            await writer.drain()
            sent += 2**16

    async with answering(endless) as url:
        upstream = Upstream(RemoteServer(url), scorer)
        async with serve(ANY, upstream=upstream, scheduler=scorer) as client:
            response = await client.post(CHAT, json=asking(stream=True), timeout=LIMIT)
        await upstream.server.close()
    assert response.status_code == 502
    assert "sent more than" in response.json()["error"]["message"]
    assert sent < 2**26


@pytest.mark.parametrize(
    ("status", "more", "expected", "wait"),
    [
        (503, {"retry-after": "7"}, 502, "7"),
        (503, {}, 502, "1"),
        (502, {"retry-after": "99999999999"}, 502, "3600"),
        (504, {"retry-after": "soon"}, 502, "1"),
        (529, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 502, "1"),
        (429, {"retry-after": "12"}, 429, "12"),
        (401, {"retry-after": "7"}, 502, None),
        (302, {}, 502, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_passes_may_be_asked_for_again(
    serve: Serve, scorer: Scheduler, status: int, more: dict[str, str], expected: int, wait: str | None, stream: bool
) -> None:
    """OpenAI's clients ask again on 429 and 5xx, after so many seconds, unless `x-should-retry` decides it."""
    async with serve(ALL, **behind(Other(status=status, headers=more), scorer)) as client:
        headers = (response := await client.post(CHAT, json=asking(stream=stream))).headers
    found = (response.status_code, headers.get("retry-after"), headers.get("x-should-retry"))
    assert found == (expected, wait, None if wait else "false")


async def test_an_upstream_that_is_away_may_be_asked_again(serve: Serve, scorer: Scheduler) -> None:
    upstream = Upstream(RemoteServer(f"http://127.0.0.1:{free_port()}/v1"), scorer)
    async with serve(ALL, upstream=upstream, scheduler=scorer) as client:
        response = await client.post(CHAT, json=asking())
    assert (response.status_code, response.headers.get("x-should-retry")) == (502, None)


@pytest.mark.parametrize(("usage", "counted"), [({"completion_tokens": 11, "prompt_tokens": 3}, 11), (None, None)])
async def test_the_tokens_of_several_answers(serve: Serve, scorer: Scheduler, usage: Any, counted: int | None) -> None:
    """As the upstream counts them; without its count, or where some are withheld, as far as they were scored."""
    texts = ["It is so.", "It is not so."]
    hello = (Message("user", "hello"),)
    verdicts = [(await scorer.judged(ForeignText(text=text, conversation=hello))).verdict for text in texts]
    scored = [verdict.details.scored_tokens for verdict in verdicts]
    between = sum(verdict.uncertainty or 0.0 for verdict in verdicts) / 2
    choices = [{"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate(texts)]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"choices": choices, "usage": usage}))
    upstream = Upstream(RemoteServer("http://other/v1", transport=transport), scorer)
    for policy, expected in (
        (ALL, counted or sum(scored)),
        (NONE, 0),
        (Policy(threshold=between, on_cut="score"), None),
    ):
        async with serve(policy, upstream=upstream, scheduler=scorer) as client:
            found = (await client.post(CHAT, json=asking(n=2))).json()["usage"]["completion_tokens"]
        assert found == expected or (expected is None and found in scored)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "Yes."}]}
READ: list[dict[str, Any]] = [
    {"max_tokens": -1}, {"max_completion_tokens": 0}, {"top_k": -1}, {"temperature": 3}, {"n": 20}, {"top_p": 0},
    {"logprobs": True, "top_logprobs": 50}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": [1]}, {"seed": "any"}, {"min_p": 0.1, "user": None}, {"stop": ["a", "b", "c", "d", "e"]},
    {"messages": [THOUGHT, {"role": "user", "content": "hello"}]},
]  # fmt: skip
UNREAD: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]},
    {"messages": [{"role": "user", "content": [SOUND]}]},
    {"messages": [{"role": "function", "name": "f", "content": "3"}, {"role": "user", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
    {"messages": [{"role": "user", "content": {"text": "hello"}}]},
    {"tools": [{"type": "web_search"}]}, {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"tools": "all"}, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    {"response_format": {"type": "grammar", "grammar": "root ::= 'a'"}}, {"response_format": "text"},
    {"response_format": {"type": "structural_tag"}},
]  # fmt: skip


@pytest.mark.parametrize("more", [*READ, *UNREAD], ids=lambda options: "-".join(options))
async def test_what_another_server_can_do_is_its_own_to_refuse(
    serve: Serve, scorer: Scheduler, more: dict[str, Any]
) -> None:
    """It is passed on as it came. Where the scorer cannot read it, the answer has no score, and the reason."""
    for live in (False, True) if "n" not in more else (False,):
        other = Other(["Paris."])
        async with serve(ANY, mode="annotate", **behind(other, scorer)) as client:
            response = await client.post(CHAT, json=asking(**{"stream": live, **more}))
        assert response.status_code == 200, response.text
        found = events(response.text) if live else [response.json()]
        texts = [choice.get("delta", choice.get("message")).get("content") for c in found for choice in c["choices"]]
        assert "Paris." in texts
        kept = {name: value for name, value in more.items() if name not in ("stream_options", "n")}
        assert {name: other.bodies[0][name] for name in kept} == kept
        verdicts = [c["logprobs"]["semgrad_guard"] for e in found for c in e["choices"] if c["logprobs"]]
        assert {verdict["status"] for verdict in verdicts} == {"unscored" if more in UNREAD else "scored"}
        assert more not in UNREAD or "the scorer cannot read the request" in verdicts[0]["reason"]


async def test_what_cannot_be_scored_is_withheld_where_the_operator_says_so(serve: Serve, scorer: Scheduler) -> None:
    for policy, expected in ((ALL, "I don't know."), (ANY, "Paris.")):
        async with serve(policy, **behind(Other("Paris."), scorer)) as client:
            response = await client.post(CHAT, json=asking(**UNREAD[0]))
        assert response.json()["choices"][0]["message"]["content"] == expected


async def test_a_prompt_that_is_too_long_for_the_scorer(
    serve: Serve, make_language_model: Callable[..., LanguageModel]
) -> None:
    """The upstream may read more than the local model."""
    scorer = Scheduler(Answerer(make_language_model(max_position_embeddings=64), HybridGrad(), served=True))
    async with serve(ANY, mode="annotate", **behind(Other("Paris."), scorer)) as client:
        found = (await client.post(CHAT, json=asking("word " * 100))).json()
    assert (found["choices"][0]["message"]["content"], found["semgrad_guard"]["status"]) == ("Paris.", "unscored")


@pytest.mark.parametrize(
    "more", [{"model": 3}, {"n": 0}, {"n": 129}, {"stream": "yes"}, {"messages": []}, {"messages": "x"}]
)
async def test_what_decides_how_we_answer_must_be_right(serve: Serve, scorer: Scheduler, more: dict[str, Any]) -> None:
    other = Other("Paris.")
    async with serve(ANY, mode="annotate", **behind(other, scorer)) as client:
        assert (await client.post(CHAT, json=asking(**more))).status_code == 400
    assert other.bodies == []
