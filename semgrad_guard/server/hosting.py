"""Where a server listens, who may call it there, how long a client may keep it waiting, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from semgrad_guard.errors import InputError
from semgrad_guard.settings import API_KEY, DRAIN_SECONDS

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REMEDY = f"set {API_KEY}, or give --api-key-file. Without one it listens on 127.0.0.1"
_OPEN_FOR_ONE = 4
_MANY = 65_536


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def allowed_hosts(
    host: str, *, has_keys: bool, named: Iterable[str] = (), remedy: str = _REMEDY
) -> frozenset[str] | None:
    """The names under which a server may be called; None: any.

    A server without keys is called by the names of this machine only: a page in a browser may point a name of its own
    at it. `remedy` explains how this server gets a key.

    Raises:
        InputError: other machines could reach the server, and it has no key.
    """
    own = frozenset(name.lower() for name in named)
    if has_keys:
        return own | _LOOPBACK | {host.strip("[]").lower()} if own else None
    if not is_loopback(host):
        raise InputError(f"at {host} others could reach this server, so it takes an API key: {remedy}")
    return _LOOPBACK | own | {host.strip("[]").lower()}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free.

    Raises:
        InputError: the address is not available.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) where a socket names TCP as its protocol. Otherwise a stream's
    # first piece would wait 40 ms for the client's acknowledgement of the head.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise InputError(f"nothing can listen at {host}:{port}: {error.strerror}. Choose another --port") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL that clients take as their base_url."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How much one connection may take.

    Args:
        most: connections that are open at once. For a further one, the one that has waited longest for the end of its
            request is closed, so that half-sent requests lock out no client.
        head_bytes: the length of a request's head, up to which the server waits for its end.
        head_seconds: in which a request's head must arrive; bytes that drip in do not extend it.
        idle_seconds: between an answer and the next request.
        taking_seconds: in which a client must read something of its answer.
    """

    most: int = 1024
    head_bytes: int = 65_536
    head_seconds: float = 10.0
    idle_seconds: int = 30
    taking_seconds: float = 60.0


class Connection(H11Protocol):
    """HTTP/1.1 with limits of time; uvicorn has one for idle connections alone, which each byte extends.

    `waiting` are the server's connections without a whole request, in the order in which they began to wait.
    """

    def __init__(self, limits: ConnectionLimits, waiting: dict[Connection, None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits, self._waiting = limits, waiting
        self._head: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, in the place of another connection if need be."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.most and self._waiting:
            next(iter(self._waiting)).hang_up()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read the data, and wait for more where the request is not whole."""
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn limits the time until its first byte."""
        super().on_response_complete()
        if not self._is_answering:
            self._waiting[self] = None

    def pause_writing(self) -> None:
        """The client reads less than it is sent."""
        super().pause_writing()
        self._taking = self.loop.call_later(self._limits.taking_seconds, self.hang_up)

    def resume_writing(self) -> None:
        """The client has read something."""
        super().resume_writing()
        self._taking = _ended(self._taking)

    def hang_up(self) -> None:
        """Close it at once: the client will not read the rest."""
        self._stop_waiting()
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        if self._is_answering:
            self._head = _ended(self._head)  # the application limits the time of a body
            if cast("Any", self.cycle).more_body:
                self._waiting.setdefault(self)
            else:
                self._waiting.pop(self, None)
        elif self._head is None and not self.transport.is_closing():
            self._waiting.setdefault(self)
            self._head = self.loop.call_later(self._limits.head_seconds, self.hang_up)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        self._head = _ended(self._head)


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Announced(uvicorn.Server):
    """Calls `started` once requests are answered, and once a signal ends it as it should."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self.started:
            self._announce()


def server_of(app: FastAPI, limits: ConnectionLimits, *, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server of an application. `started` is called when it has begun."""
    http: Any = partial(Connection, limits, dict[Connection, None]())
    config = uvicorn.Config(
        app,
        http=http,
        access_log=False,
        log_level="error",  # its warnings are one for each request that is no HTTP, and advice about websockets
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    return _Announced(config, started)


def run(app: FastAPI, bound: socket.socket, *, connections: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes; requests that run then are finished first. `started` is called when it has begun.

    Up to four connections may be open for each request that is answered, and as many as half of the files that the
    process may open; models and logs take some of them.
    """
    files = _MANY
    if os.name == "posix":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _MANY if soft == resource.RLIM_INFINITY else soft
    limits = ConnectionLimits(most=min(_OPEN_FOR_ONE * connections, files // 2))
    server_of(app, limits, started=started).run(sockets=[bound])
