"""What every request passes before it reaches a route: how many there are, whom it calls, and who sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semgrad_guard.server.http_errors import ENDING, HttpError
from semgrad_guard.server.keys import Keys
from semgrad_guard.server.pages import PATHS

_OPEN = frozenset({"/healthz", "/readyz"}) | PATHS


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
        if self._inside >= self._connections:
            said = f"{self._inside} requests are being answered, which is the limit; ask again"
            return HttpError(503, "too_many_connections", said, headers={"retry-after": "1"})
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            # A page in a browser may point a name of its own at this machine.
            return HttpError(421, "unknown_host", "this server is not called by that name; see --allow-host")
        if scope["path"] not in _OPEN and not self._keys.open_to(_authorization(headers)):
            challenge = {"www-authenticate": "Bearer"}
            return HttpError(401, "invalid_api_key", "send the header Authorization: Bearer KEY", headers=challenge)
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
