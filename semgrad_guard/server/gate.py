"""What every request passes before it reaches a route: how many there are, whom it calls, and who sends it."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semgrad_guard.server.http_errors import ENDING, HttpError
from semgrad_guard.server.keys import Keys
from semgrad_guard.server.pages import PATHS

_HEALTH = frozenset({"/healthz", "/readyz"})
_PROBES = _HEALTH | {"/metrics"}
"""What kubelet, HAProxy and Prometheus ask for by address, and HTTP/1.0 without a Host header."""
_OPEN = _HEALTH | PATHS


class Gate:
    """ASGI middleware: refuses what is too much, comes under a foreign name, or has no key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        connections: int,
        hosts: frozenset[str] | None,
        report: Callable[[Exception], HttpError],
    ) -> None:
        self._app, self._keys, self._connections, self._hosts = app, keys, connections, hosts
        self._report = report
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope)
        if problem is not None:
            await _response(problem)(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._answered(scope, receive, send)
        finally:
            self._inside -= 1

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on.

        A bug ends here: servers would log it with its words, which may be a client's. So does a cancellation, which
        comes when the time to finish what had begun is over: servers would answer it as if it were a bug.
        """
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - see above
            problem = self._report(ENDING if isinstance(error, asyncio.CancelledError) else error)
            if not begun:
                await _response(problem)(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as the router reads it
        if self._inside >= self._connections and path not in _HEALTH:
            said = f"{self._inside} requests are being answered, which is the limit; ask again"
            return HttpError(503, "too_many_connections", said, headers={"retry-after": "1"})
        if problem := self._foreign(scope["method"], headers, path):
            return problem
        if path not in _OPEN and not self._keys.open_to(_authorization(headers)):
            challenge = {"www-authenticate": "Bearer"}
            return HttpError(401, "invalid_api_key", "send the header Authorization: Bearer KEY", headers=challenge)
        return None

    def _foreign(self, method: str, headers: Headers, path: str) -> HttpError | None:
        """Refuse other names: a page in a browser may point a name of its own at this machine.

        Its requests name a host, never an address, and it has no key: so probes by address are no such requests. Where
        vLLM hosts our routes, it allows every origin; a preflight alone gets nothing.
        """
        if self._hosts is None:
            return None
        name, origin = _name(headers.get("host", "")), headers.get("origin")
        if name not in self._hosts and not (path in _PROBES and (self._keys or _is_address(name))):
            return HttpError(421, "unknown_host", "this server is not called by that name; see --allow-host")
        if origin is not None and method != "OPTIONS" and _host_of(origin) not in self._hosts:
            return HttpError(403, "foreign_origin", "pages from elsewhere may not ask this server; see --allow-host")
        return None


def _response(problem: HttpError) -> JSONResponse:
    return JSONResponse(problem.body, status_code=problem.status, headers=problem.headers)


def _authorization(headers: Headers) -> str | None:
    """The Authorization header; LiteLLM's guardrails send their key as x-api-key."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


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
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
