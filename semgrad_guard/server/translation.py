"""`Translation`: a request in one of OpenAI's protocols, as requests for chat completions.

Every rule is about chat completions: how a request is read, what is decided, and which parts of an answer leave. The
other protocols are translated to requests for these, and their completions or chunks back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from semgrad_guard.errors import InputError
from semgrad_guard.server.answers import HttpError

Json = dict[str, Any]


class Translation(Protocol):
    """A request, translated; `prefix` begins the id of its response."""

    prefix: ClassVar[str]

    @property
    def bodies(self) -> Sequence[Mapping[str, Any]]:
        """The bodies of the chat completions; one where the response is streamed."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of fields that chat completions name otherwise."""
        ...

    @property
    def end(self) -> str:
        """The last event of a stream."""
        ...

    def whole(self, completions: Sequence[Json]) -> Json:
        """The response, of one completion for each body."""
        ...

    def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """The events of a stream, of its chunks. One with a `type` is also named by it."""
        ...

    def failed(self, problem: HttpError) -> Json:
        """The event of an error after the beginning of a stream."""
        ...


@dataclass(frozen=True)
class Untranslated:
    """A request for a chat completion itself."""

    bodies: Sequence[Mapping[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    end: str = "data: [DONE]\n\n"
    prefix: ClassVar[str] = "chatcmpl-"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The request with this body."""
        return cls((body,))

    def whole(self, completions: Sequence[Json]) -> Json:
        """As `Translation.whole`."""
        return completions[0]

    def events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """As `Translation.events`."""
        return chunks

    def failed(self, problem: HttpError) -> Json:
        """As `Translation.failed`."""
        return problem.body


def require_none_of(given: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse fields of chat completions that another protocol names otherwise, or does not have.

    Raises:
        InputError: there is one; the message has the protocol's own name for it.
    """
    for name, instead in names.items():
        if given.get(name) is not None:
            raise InputError(f"unknown field: {name!r}; " + (f"use {instead!r}" if instead else "leave it out")).about(
                name
            )
