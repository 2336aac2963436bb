"""Clients of both kinds: those that wait for an answer, and those that mean it ill."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

_ID = re.compile(r"dec_[0-9a-f]{24}")
_LONG = 10_000_000
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's response: status 0 without headers; `broken` is the reason why the body ended too early."""

    status: int
    text: str
    headers: Mapping[str, str]
    broken: str | None = None

    @property
    def ids(self) -> set[str]:
        """The decisions that were acknowledged, by their ids."""
        return set(_ID.findall(f"{self.headers} {self.text}"))

    @property
    def choices(self) -> list[tuple[str, Json]]:
        """The text and the verdict of every answer, streamed or not."""
        found: dict[int, tuple[str, Json]] = {}
        for part in self._parts():
            for choice in part["choices"]:
                message = choice.get("message") or choice.get("delta") or {}
                text, record = found.get(choice["index"], ("", {}))
                piece = message.get("content") or message.get("refusal") or ""
                found[choice["index"]] = text + piece, (choice["logprobs"] or {}).get("semgrad_guard") or record
        return [found[index] for index in sorted(found)]

    @property
    def error(self) -> str | None:
        """The code of the error in place of the answer, or at a stream's end."""
        last = self._parts()[-1]
        return last["error"]["code"] if "error" in last else None

    @property
    def whole(self) -> bool:
        """Whether it came to its end."""
        streamed = self.headers.get("content-type", "").startswith("text/event-stream")
        return self.broken is None and (not streamed or self.text.endswith("data: [DONE]\n\n"))

    def _parts(self) -> list[Json]:
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return [json.loads(self.text)]
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def asking(model: str, text: str, **more: Any) -> Json:
    """The body of a chat completion."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


@asynccontextmanager
async def connected(url: str, *, timeout: float = 300.0) -> AsyncGenerator[httpx.AsyncClient]:
    """A client with connections of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False) as client:
        yield client


async def ask(client: httpx.AsyncClient, body: Json) -> Reply:
    """The response to a waiting client; the received part of it where the connection broke."""
    status, headers, received, broken = 0, dict[str, str](), bytearray(), None
    try:
        async with client.stream("POST", "/chat/completions", json=body) as response:
            status, headers = response.status_code, dict(response.headers)
            async for piece in response.aiter_bytes():
                received += piece
    except httpx.TransportError as error:
        broken = type(error).__name__
    return Reply(status=status, text=received.decode(errors="replace"), headers=headers, broken=broken)


# Those that mean it ill. Each is given an address and a body that would be answered, and returns the status it got.

Rude = Callable[[str, int, Json], Awaitable[int | None]]


async def _says(host: str, port: int, *pieces: bytes, wait: float | None = 60.0) -> int | None:
    """Send raw bytes; the status within `wait` seconds, None where none comes, or without waiting."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if wait is None:
            return None
        line = await asyncio.wait_for(reader.readline(), wait)
        return int(line.split()[1]) if line else None
    except (TimeoutError, OSError):
        return None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _head(length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
    )
    return head.encode()


async def hangs_up(host: str, port: int, body: Json) -> int | None:
    """Sends a request and leaves."""
    data = json.dumps(body).encode()
    return await _says(host, port, _head(len(data)) + data, wait=None)


async def leaves_a_stream(host: str, port: int, body: Json) -> int | None:
    """Reads the status of a stream, and leaves in the middle of it."""
    data = json.dumps({**body, "stream": True}).encode()
    return await _says(host, port, _head(len(data)) + data)


async def loses_patience(host: str, port: int, body: Json) -> int | None:
    """Waits for a moment, and leaves."""
    data = json.dumps(body).encode()
    return await _says(host, port, _head(len(data)) + data, wait=0.3)


async def breaks_off(host: str, port: int, body: Json) -> int | None:
    """Sends half of a body, is silent, and leaves."""
    data = json.dumps(body).encode()
    return await _says(host, port, _head(len(data)) + data[: len(data) // 2], wait=0.5)


async def sends_no_json(host: str, port: int, body: Json) -> int | None:
    """Sends a body that is none."""
    data = json.dumps(body).encode()[:-1]
    return await _says(host, port, _head(len(data)) + data)


async def sends_ten_megabytes(host: str, port: int, body: Json) -> int | None:
    """Sends a prompt that is far too long, with its length."""
    data = json.dumps({**body, "messages": [{"role": "user", "content": "word " * (_LONG // 5)}]}).encode()
    return await _says(host, port, _head(len(data)), data)


async def sends_ten_megabytes_in_chunks(host: str, port: int, body: Json) -> int | None:
    """Sends a prompt that is far too long, piece by piece, without its length."""
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return await _says(host, port, _head(None), *[piece] * (_LONG // 0x10000), b"0\r\n\r\n")


async def sends_two_megabytes(host: str, port: int, body: Json) -> int | None:
    """Sends a prompt that the server reads, and the model cannot."""
    data = json.dumps({**body, "messages": [{"role": "user", "content": "word " * 380_000}]}).encode()
    return await _says(host, port, _head(len(data)), data)


RUDE: Mapping[Rude, frozenset[int | None]] = {
    hangs_up: frozenset({None}),
    leaves_a_stream: frozenset({200, 429}),
    loses_patience: frozenset({None, 200, 429}),
    breaks_off: frozenset({None}),
    sends_no_json: frozenset({400}),
    sends_ten_megabytes: frozenset({None, 413}),  # None: the connection was reset while it was still sending
    sends_ten_megabytes_in_chunks: frozenset({None, 413}),
    sends_two_megabytes: frozenset({400, 429}),
}
"""Hostile clients, and their allowed statuses."""
