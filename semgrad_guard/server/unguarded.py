"""Routes of an upstream whose answers are not judged: refused, unless the operator lets one through by name.

A request chooses among the named routes and makes none: it is matched as a whole, and the upstream gets the operator's
own spelling. So no other spelling of a path leads anywhere.

Why: docs/adr/0155-unguarded-routes-by-name.md
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from semgrad_guard.errors import InputError
from semgrad_guard.server.answers import ACTION_HEADER, HttpError
from semgrad_guard.server.upstream import RemoteServer

_PREFIX = "/v1/"
_FORM = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)*")
_KINDS = frozenset({"application/json", "text/event-stream", "text/plain"})
"""The content types that are passed on; a browser must not take an upstream's answer for a page."""


@dataclass(frozen=True, eq=False)
class Unguarded:
    """The upstream, and those of its routes that are passed on without a verdict (`embeddings`, `audio/speech`).

    Raises:
        InputError: a name is not a route.
    """

    server: RemoteServer
    routes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for route in sorted(self.routes):
            if not _FORM.fullmatch(route):
                raise InputError(
                    f"{route[:60]!r} is not a route such as embeddings or audio/speech; it follows /v1/, in small "
                    "letters, without a slash at either end"
                )

    def require_not(self, guarded: Iterable[str]) -> None:
        """Refuse names of routes that this server answers itself.

        Raises:
            InputError: one is among the paths that are guarded.
        """
        if own := sorted(self.routes & {path.removeprefix(_PREFIX) for path in guarded}):
            raise InputError(f"{', '.join(own)}: this server answers that itself; leave --allow-unguarded out for it")

    @property
    def paths(self) -> Mapping[str, str]:
        """The named routes, by the paths at which clients find them."""
        return {_PREFIX + route: route for route in sorted(self.routes)}

    async def passed_on(self, route: str, body: Mapping[str, Any]) -> StreamingResponse:
        """The upstream's answer, as it comes. Neither the client's headers nor its key are sent.

        Raises:
            UpstreamError: it refuses, or cannot be reached.
        """
        stack = AsyncExitStack()
        response = await stack.enter_async_context(self.server.open(route, body))
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        return StreamingResponse(
            _closing(response.aiter_bytes(), stack),
            media_type=kind if kind in _KINDS else "application/octet-stream",
            headers={ACTION_HEADER: "unguarded", "cache-control": "no-store", "x-content-type-options": "nosniff"},
            background=BackgroundTask(stack.aclose),
        )


async def _closing(pieces: AsyncIterator[bytes], stack: AsyncExitStack) -> AsyncGenerator[bytes]:
    async with stack:
        async for piece in pieces:
            yield piece


def refusal(path: str) -> HttpError | None:
    """The error for a path that this server does not know, in front of an upstream that may know it."""
    if "v1" not in path.lower().split("/"):
        return None
    return HttpError(
        403,
        "route_not_guarded",
        "the answers of this route are not judged here, so it is not passed on; use POST /v1/chat/completions, or have "
        "the operator name the route with --allow-unguarded",
    )
