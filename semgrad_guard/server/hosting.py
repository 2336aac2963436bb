"""Where a server listens, how it ends, and the checks that every request passes before it reaches a route: how many
there are, the name of the host, and the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semgrad_guard.errors import InputError
from semgrad_guard.server.problems import ENDING, ClientGoneError, HttpError
from semgrad_guard.settings import API_KEY, DRAIN_SECONDS

_HEALTH = frozenset({"/healthz", "/readyz"})
_PROBES = _HEALTH | {"/metrics"}
"""The routes that kubelet, HAProxy and Prometheus request by address, and HTTP/1.0 without a Host header."""
_SHORTEST_KEY = 16


class Keys:
    """The API keys that open a server; without any, it is open. They are held as hashes.

    Args:
        keys: the server's own.
        of_host: those of the server that hosts our routes; their length is that server's choice.

    Raises:
        InputError: one of the server's own is shorter than 16 characters.
    """

    def __init__(self, keys: Iterable[str] = (), *, of_host: Iterable[str] = ()) -> None:
        own = [key.strip() for key in keys if key.strip()]
        if any(len(key) < _SHORTEST_KEY for key in own):
            raise InputError(f"an API key has at least {_SHORTEST_KEY} characters; make one with: openssl rand -hex 32")
        self._hashes = tuple(_hash(key) for key in (*own, *(key.strip() for key in of_host if key.strip())))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def open_to(self, authorization: str | None) -> bool:
        """Whether a request with this Authorization header may come in. Keys are compared in constant time."""
        if not self._hashes:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _hash(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]  # all of them: no early end
        return scheme.lower() == "bearer" and any(matches)

    @classmethod
    def from_file(cls, path: Path) -> list[str]:
        """The keys in a file, one in each line; lines that begin with "#" are comments.

        Raises:
            InputError: the file cannot be read, or holds no key.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise InputError(f"the API keys in {path} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise InputError(f"{path} holds no API key; write one a line")
        return keys


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Gate:
    """ASGI middleware: refuses a request that is one too many, comes under a foreign name, or has no key.

    A request counts once it is whole, so that half-sent ones lock out no client. `open_paths` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        connections: int,
        hosts: frozenset[str] | None,
        open_paths: frozenset[str],
        report: Callable[[Exception], HttpError],
    ) -> None:
        self._app, self._keys, self._connections, self._hosts = app, keys, connections, hosts
        self._open_paths = _HEALTH | open_paths
        self._report = report
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, or answer it here.

        Every error ends here. Servers would log a bug with its text, which may be a client's; and they would take a
        cancellation for one, which comes when the time to finish running requests is over.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"].removeprefix(scope.get("root_path", ""))  # as routed
        is_inside = begun = False

        def enter() -> None:
            nonlocal is_inside
            if not is_inside:
                self._require_room(path)
                self._inside += 1
                is_inside = True

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                enter()
            return message

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check_host(scope["method"], headers, path)
            self._check_key(headers, path)
            if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
                enter()  # a route need not read such a body
            with suppress(ClientGoneError):
                await self._app(scope, receiving, sending)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - see above
            problem = self._report(ENDING if isinstance(error, asyncio.CancelledError) else error)
            if not begun:
                await problem.response(scope, receive, send)
        finally:
            self._inside -= is_inside

    def _require_room(self, path: str) -> None:
        if path not in _HEALTH and self._inside >= self._connections:
            text = f"{self._inside} requests are being answered, which is the limit; try again later"
            raise HttpError(503, "too_many_connections", text, headers={"retry-after": "1"})

    def _check_key(self, headers: Headers, path: str) -> None:
        if path not in self._open_paths and not self._keys.open_to(headers.get("authorization")):
            challenge = {"www-authenticate": "Bearer"}
            raise HttpError(401, "invalid_api_key", "send the header Authorization: Bearer KEY", headers=challenge)

    def _check_host(self, method: str, headers: Headers, path: str) -> None:
        """Refuse foreign names.

        A page in a browser may point a name of its own at this machine. Its requests name a host, never an address, and
        have no key, so that probes by address cannot be such requests. Where vLLM hosts our routes, it allows every
        origin; a preflight alone gets nothing.

        Raises:
            HttpError: the request is refused.
        """
        if self._hosts is None:
            return
        name, origin = _name(headers.get("host", "")), headers.get("origin")
        if name not in self._hosts and not (path in _PROBES and (self._keys or _is_address(name))):
            raise HttpError(421, "unknown_host", "this server does not have that name; see --allow-host")
        if origin is not None and method != "OPTIONS" and _host_of(origin) not in self._hosts:
            raise HttpError(403, "foreign_origin", "pages from elsewhere may not use this server; see --allow-host")


def _name(host: str) -> str:
    """A Host header without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()


def _is_address(name: str) -> bool:
    """Whether a Host header holds an address, or nothing."""
    try:
        return not name or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _host_of(origin: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(origin).hostname
    return None


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
