"""Where a server listens, who may call it there, and how it ends."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable

import uvicorn
from starlette.applications import Starlette

from semgrad_guard.errors import InputError
from semgrad_guard.settings import API_KEY, DRAIN_SECONDS

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REMEDY = f"set {API_KEY}, or give --api-key-file. Without one it listens on 127.0.0.1"
_OPEN_FOR_ONE = 4
"""Connections for each request that is answered; with one more, the server answers 503."""
_HEAD_BYTES, _IDLE_SECONDS = 65_536, 30
"""Bytes of a request's head that has not ended, and seconds between an answer and the next request."""


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


def server_of(app: Starlette, *, connections: int, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A server of an application that answers so many requests at once; waiting ones have connections, too.

    `started` is called when it has begun.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        access_log=False,
        log_level="error",  # its warnings are one for each request that is no HTTP, and advice about websockets
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=_OPEN_FOR_ONE * connections,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    return _Announced(config, started)


def run(app: Starlette, bound: socket.socket, *, connections: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes; requests that run then are finished first. `started` is called when it has begun."""
    server_of(app, connections=connections, started=started).run(sockets=[bound])
