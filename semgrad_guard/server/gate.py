"""The checks that every request passes before it reaches a route: how many there are, the host's name, and the key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semgrad_guard.errors import InputError
from semgrad_guard.server.errors import ENDING, ClientGoneError, HttpError

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
