"""Where a server listens, who may call it there, and how it ends."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from semgrad_guard.errors import InputError
from semgrad_guard.server.connections import Connection, ConnectionLimits, Waiting

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REMEDY = "set SEMGRAD_GUARD_API_KEY, or give --api-key-file. Without one it listens on 127.0.0.1"
_DRAIN = 30
"""Seconds that running requests have to finish once the server is to end."""
_OPEN_FOR_EACH = 4
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
    at it. `remedy` says how this server gets a key.

    Raises:
        InputError: others could reach the server, and it has no key.
    """
    own = frozenset(each.lower() for each in named)
    if has_keys:
        return own | _LOOPBACK | {host.strip("[]").lower()} if own else None
    if not is_loopback(host):
        raise InputError(f"at {host} others could reach this server, so it takes an API key: {remedy}")
    return _LOOPBACK | own | {host.strip("[]").lower()}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free.

    Raises:
        InputError: the address cannot be had.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) where a socket says that it speaks TCP. Else a stream's first
    # piece would wait 40 ms for the client's word that it has the head.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise InputError(f"nothing can listen at {host}:{port}: {error.strerror}. Choose another --port") from error
    return found


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


def server_of(app: FastAPI, limits: ConnectionLimits, *, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """What serves an application. `started` is called when it has begun."""
    http: Any = partial(Connection, Waiting(limits))
    config = uvicorn.Config(
        app,
        http=http,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=_DRAIN,
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    return _Announced(config, started)


def run(app: FastAPI, bound: socket.socket, *, connections: int, started: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes; requests that run then are finished first. `started` is called when it has begun.

    So many connections may be open as the process has files for, up to four for each request that is answered.
    """
    limits = ConnectionLimits(most=min(_OPEN_FOR_EACH * connections, _most_files() // 2))
    server_of(app, limits, started=started).run(sockets=[bound])


def _most_files() -> int:
    """How many files the process may open; models and logs take some of them."""
    if os.name == "posix":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _MANY if soft == resource.RLIM_INFINITY else soft
    return _MANY
