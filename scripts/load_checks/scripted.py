"""`Scripted`: another server, whose every draft carries an unguessable nonce, or which fails on request.

A question begins with a number, which selects its draft's nonce, and may name a fault: "17 slow".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

LETTERS = "QXZJKV"
"""Nonces are written in letters that occur together nowhere else."""
LENGTH = 20
FAULTS = ("slow", "lies", "breaks", "nonsense", "fails")
Json = dict[str, Any]


def nonce(secret: bytes, number: int, index: int) -> str:
    """The nonce of one draft."""
    digest = blake2b(f"{number} {index}".encode(), key=secret, digest_size=LENGTH).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest)


def draft(secret: bytes, number: int, index: int = 0) -> str:
    """One draft."""
    return f"The word is {nonce(secret, number, index)}."


@dataclass(eq=False)
class Scripted:
    """The server; `url` is where it listens, once it was started."""

    secret: bytes
    url: str = ""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._open):
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while await self._answered(reader, writer):
                    await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(length))
        number, _, fault = body["messages"][-1]["content"].partition(" ")
        if body["model"] == "large":  # who is escalated to, and gives away nothing of the draft
            writer.write(_whole(_completion([_said("a second opinion")])))
            return True
        if fault in FAULTS:
            return await self._fails(reader, writer, fault, draft(self.secret, int(number)))
        answers = [self._answer(body, int(number), index) for index in range(body.get("n") or 1)]
        writer.write(_stream(answers[0]) if body.get("stream") else _whole(_completion(answers)))
        return True

    def _answer(self, body: Mapping[str, Any], number: int, index: int) -> Json:
        """One choice; its nonce is also in its log-probabilities, or in the call of a tool."""
        word = nonce(self.secret, number, index)
        if body.get("tools"):
            function = {"name": "look_up", "arguments": json.dumps({"word": word})}
            called = {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
            return {"message": {"role": "assistant", **called}, "finish_reason": "tool_calls", "logprobs": None}
        pieces = ["The word is ", word[: LENGTH // 2], word[LENGTH // 2 :], "."]
        entries = [{"token": piece, "logprob": -0.5, "bytes": None, "top_logprobs": []} for piece in pieces]
        return {
            **_said(draft(self.secret, number, index), reasoning_content=f"I think of {word}"),
            "logprobs": {"content": entries} if body.get("logprobs") else None,
        }

    async def _fails(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str, secret: str) -> bool:
        """Fail in mid-answer, with the draft already sent."""
        body = json.dumps(_completion([_said(secret)])).encode()
        if fault == "slow":
            await reader.read()  # until the client gives up
        elif fault == "lies":
            writer.write(_head("application/json", len(body) + 1000) + body)
        elif fault == "breaks":
            chunk = {"choices": [{"index": 0, "delta": {"content": secret}}]}
            writer.write(_head("text/event-stream", 100_000) + f"data: {json.dumps(chunk)}\n\n".encode())
        elif fault == "nonsense":
            writer.write(_head("application/json", len(body)) + body[::-1])
        else:
            writer.write(b"HTTP/1.1 500 Oops\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return False


def _said(text: str, **more: Any) -> Json:
    return {"message": {"role": "assistant", "content": text, **more}, "finish_reason": "stop", "logprobs": None}


def _completion(answers: list[Json]) -> Json:
    choices = [{"index": index, **answer} for index, answer in enumerate(answers)]
    return {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}}


def _stream(answer: Json) -> bytes:
    """A choice as a stream, in four pieces."""
    message, entries = answer["message"], (answer["logprobs"] or {}).get("content")
    if "tool_calls" in message:
        pieces: list[Json] = [{"delta": {"tool_calls": [{"index": 0, **call} for call in message["tool_calls"]]}}]
    else:
        text, middle = message["content"], -1 - LENGTH // 2
        parts = (text[: -1 - LENGTH], text[-1 - LENGTH : middle], text[middle:-1], text[-1:])
        pieces = [
            {"delta": {"content": part}, "logprobs": entries and {"content": [entries[place]]}}
            for place, part in enumerate(parts)
        ]
    pieces.append({"delta": {}, "finish_reason": answer["finish_reason"]})
    lines = [json.dumps({"choices": [{"index": 0, **piece}]}) for piece in pieces]
    data = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()
    return _head("text/event-stream", len(data)) + data


def _whole(body: Json) -> bytes:
    data = json.dumps(body).encode()
    return _head("application/json", len(data)) + data


def _head(kind: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()
