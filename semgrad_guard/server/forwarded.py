"""Requests for another server, which may do more than our engine: what it is asked is its own to check.

Of such a request we read what we need. What the scorer cannot read is passed on, and its answer has no score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.errors import InputError
from semgrad_guard.records import Message
from semgrad_guard.server.protocol import CUTS, ChatRequest

_OURS = frozenset({"model", "messages", "stream", "n", "semgrad_guard"})
"""What decides how we answer, so that it must be right."""
_SCORED = frozenset({"tools", "tool_choice", "response_format"})
"""What changes the prompt, beside the messages."""


@dataclass(frozen=True)
class Forwarded:
    """A request as far as we read it; `unread` says why its answer cannot be scored, `left` which of its fields are
    not in the `request`, and why."""

    request: ChatRequest
    conversation: tuple[Message, ...] = ()
    form: AnswerForm | None = None
    unread: str | None = None
    left: Mapping[str, str] = field(default_factory=dict[str, str])

    def require_cuts(self, limit: int) -> None:
        """Refuse cuts that this server is to make and cannot read, or that lie beyond its own limit.

        Raises:
            InputError: there are some.
        """
        if unread := [said for name, said in self.left.items() if name in CUTS]:
            raise InputError(unread[0])
        self.request.require_within(limit)


def forwarded(body: Mapping[str, Any]) -> Forwarded:
    """Read a request that another server answers.

    Raises:
        ValidationError: what decides how we answer is wrong.
    """
    kept, unread = {**body, "stream_options": _stream_options(body.get("stream_options"))}, list[str]()
    left: dict[str, str] = {}
    while True:
        try:
            request = ChatRequest.model_validate(kept)
            break
        except ValidationError as error:
            place, said = problem_of(error)
            name = place.partition(".")[0]
            if name == "messages" and (question := _question(body.get("messages"))) is not None:
                kept["messages"] = [{"role": "user", "content": question}]
            elif name in _OURS or name not in kept:
                raise
            else:
                del kept[name]
                left[name] = f"{place}: {said}"
            if name in ("messages", *_SCORED):
                unread.append(f"{place}: {said}")
    try:
        conversation, form = request.conversation(), request.form()
    except InputError as error:
        unread.append(str(error))
        conversation, form = (), None
    if unread:
        said = f"the scorer cannot read the request ({'; '.join(unread)})"
        return Forwarded(request, unread=said, left=left)
    return Forwarded(request, conversation, form, left=left)


def problem_of(error: ValidationError) -> tuple[str, str]:
    """Where a body is wrong, and in what. What was sent is not repeated."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    return ".".join(str(part) for part in first["loc"])[:200], first["msg"]


def _stream_options(sent: Any) -> Any:
    """What of them is ours to heed; other servers know further ones."""
    if not isinstance(sent, dict):
        return sent
    return {name: value for name, value in cast("dict[str, Any]", sent).items() if name == "include_usage"}


def _question(messages: Any) -> str | None:
    """The user's last words, as far as they are text; None where these are no messages at all."""
    turns = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return None
    said = [turn.get("content") for turn in turns if turn.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else ""
