"""Other servers in this process: what they send is the test's, and what they are sent is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.server.remote import RemoteServer
from semgrad_guard.server.scheduler import ReportedQueue
from semgrad_guard.server.upstream import Upstream

Json = dict[str, Any]


class Other(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """A server that answers every request with one text, whole or in pieces.

    Args:
        text: the text, or its pieces.
        entries: their log-probabilities in OpenAI's form, which come with the pieces; `apart`: with the last chunk.
        finish: the reason why the answer ends; None: it breaks off.
        usage: the tokens that it counts.
        status: of every response; other ones than 200 have the `error`.
        headers: of every response.
        error: an error in OpenAI's form.
        before: deltas before the text of a stream, by default the further fields of the message.
        **message: further fields of the answer.
    """

    def __init__(
        self,
        text: str | Sequence[str] | None = "It is so.",
        entries: Sequence[Json] | None = None,
        *,
        apart: bool = False,
        finish: str | None = "stop",
        usage: Mapping[str, Any] | None = None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        error: Mapping[str, Any] | None = None,
        before: Sequence[Json] | None = None,
        **message: Any,
    ) -> None:
        self.pieces = [text[:3], text[3:]] if isinstance(text, str) else list(text or ())
        self.text = None if text is None else "".join(self.pieces)
        self.entries, self.apart, self.finish, self.usage, self.message = entries, apart, finish, usage, message
        self.status, self.headers, self.error, self.before = status, headers, error, before
        self.bodies, self.asked, self.sent = list[Json](), list[httpx.Request](), 0
        """The bodies of its requests, the requests, and how many pieces of a stream were taken."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.bodies.append(body)
        self.asked.append(request)
        if self.status != 200:
            error = {"error": self.error} if self.error else None
            return httpx.Response(self.status, headers=self.headers, json=error)
        if body.get("stream"):
            return httpx.Response(200, stream=self)
        message = {"role": "assistant", "content": self.text, **self.message}
        choice = {"message": message, "finish_reason": self.finish, "logprobs": {"content": self.entries}}
        choices = [{"index": number, **choice} for number in range(body.get("n") or 1)]
        return httpx.Response(200, text=json.dumps({"choices": choices, "usage": self.usage}))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks():
            self.sent += bool(chunk["choices"][0]["delta"].get("content"))
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        if self.finish is not None:
            yield b"data: [DONE]\n\n"

    def chunks(self) -> Iterator[Json]:
        """Those of a stream."""
        calls = [{"index": number, **call} for number, call in enumerate(self.message.get("tool_calls") or ())]
        own = {**self.message, **({"tool_calls": calls} if calls else {})}
        for delta in self.before if self.before is not None else [own] if own else []:
            yield {"choices": [{"index": 0, "delta": delta}]}
        by_token = not self.apart and len(self.entries or ()) == len(self.pieces)
        for number, piece in enumerate(self.pieces):
            logprobs = {"logprobs": {"content": [self.entries[number]]}} if by_token and self.entries else {}
            yield {"choices": [{"index": 0, "delta": {"content": piece}, **logprobs}]}
        if self.finish is not None:
            late = {} if by_token else {"logprobs": {"content": self.entries}}
            choice = {"index": 0, "delta": {}, "finish_reason": self.finish, **late}
            yield {"choices": [choice], **({} if self.usage is None else {"usage": self.usage})}


def token(text: str, logprob: Any, **more: Any) -> Json:
    """A token with its log-probability in OpenAI's form."""
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": [], **more}


def tokens(words: Sequence[tuple[str, Any]]) -> Json:
    """A text of these tokens, for `Other`."""
    return {"text": [word for word, _ in words], "entries": [token(*word) for word in words]}


def behind(other: httpx.AsyncBaseTransport, scorer: Any = None, **given: Any) -> Json:
    """The options of a server in front of another one; by default that one's own log-probabilities are the score."""
    scorer = scorer or ReportedQueue(ReportedScorer("tiny", **given))
    return {"upstream": Upstream(RemoteServer("http://other/v1", transport=other), scorer), "scheduler": scorer}
