"""`Connection`: one client's TCP connection, which is closed where it keeps the server waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one connection may take.

    Args:
        most: connections that are open at once. For a further one, the one that has waited longest without a request
            is closed, so that half-sent requests shut nobody out.
        head_bytes: the length of a request's head, up to which the server waits for its end.
        head_seconds: in which a request's head must have come; bytes that drip in do not extend it.
        idle_seconds: between an answer and the next request.
        taking_seconds: in which a client must take something of its answer.
    """

    most: int = 1024
    head_bytes: int = 65_536
    head_seconds: float = 10.0
    idle_seconds: int = 30
    taking_seconds: float = 60.0


@dataclass(frozen=True)
class Waiting:
    """The connections of one server that have no request, in the order in which they began to wait."""

    limits: ConnectionLimits
    connections: dict[Connection, None] = field(default_factory=dict["Connection", None])


class Connection(H11Protocol):
    """HTTP/1.1 with limits of time; uvicorn has one for idle connections alone, which each byte extends."""

    def __init__(self, waiting: Waiting, **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._waiting = waiting.limits, waiting.connections
        self._head: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, in the place of another connection if need be."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.most and self._waiting:
            next(iter(self._waiting)).hang_up()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn limits the time until its first byte."""
        super().on_response_complete()
        if not self._is_answering:
            self._waiting[self] = None

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        super().pause_writing()
        self._taking = self.loop.call_later(self._limits.taking_seconds, self.hang_up)

    def resume_writing(self) -> None:
        """The client has taken something."""
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def hang_up(self) -> None:
        """Close it at once: what the client has not taken will not be taken."""
        self._stop_waiting()
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._is_answering:
            self._stop_waiting()
        elif self._head is None and not self.transport.is_closing():
            self._waiting.setdefault(self)
            self._head = self.loop.call_later(self._limits.head_seconds, self.hang_up)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._head is not None:
            self._head.cancel()
            self._head = None
