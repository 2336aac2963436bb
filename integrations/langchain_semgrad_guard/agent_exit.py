"""The exit of an agent's guard: the messages that carry a decision, and the judgement of those that carry none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from langchain_core.callbacks import dispatch_custom_event
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from pydantic import BaseModel, TypeAdapter

from langchain_semgrad_guard.answers import Rules
from langchain_semgrad_guard.callback import observe
from semgrad_guard import METADATA_KEY
from semgrad_guard.errors import LowConfidenceError, UnenforcedPolicyError
from semgrad_guard.guard import Pending, one
from semgrad_guard.records import digest_of

JUDGED_KEY = "semgrad_guard_judged"
"""The state's key of the messages that are judged."""

_KEPT = 256


class Judged(TypedDict):
    """A message that was judged: its id, its text's digest, the ids of its calls."""

    id: str | None
    digest: str
    calls: list[str | None]


@dataclass(frozen=True)
class Delivered:
    """A message that a guard has delivered in this turn, and its draft (a review's is put away)."""

    message: AIMessage
    draft: AIMessage | None


def also(known: list[Judged] | None, new: list[Judged] | None) -> list[Judged]:
    """The state's list after an update."""
    return [*(known or []), *(new or [])][-_KEPT:]


def equals(message: AIMessage, other: AIMessage) -> bool:
    """Whether two messages have the same text and the same calls."""
    calls = [[(call["name"], call["args"], call["id"]) for call in either.tool_calls] for either in (message, other)]
    same_text = str(message.text) == str(other.text)
    return same_text and calls[0] == calls[1] and message.invalid_tool_calls == other.invalid_tool_calls


def carries(message: AIMessage, delivered: AIMessage) -> bool:
    """Whether a message is the one that a guard has delivered, with the decision about it."""
    records = [either.response_metadata.get(METADATA_KEY) for either in (message, delivered)]
    return records[0] == records[1] and equals(message, delivered)


def without_record(message: AIMessage) -> AIMessage:
    """A message without the record of the message that it was before a middleware changed it."""
    kept = {name: value for name, value in message.response_metadata.items() if name != METADATA_KEY}
    return message.model_copy(update={"response_metadata": kept})


def as_judged(messages: Sequence[BaseMessage], state: Mapping[str, Any]) -> list[Judged]:
    """The entries of one turn's messages in the state. Earlier messages of the conversation are not judged here."""
    known = {entry["id"] for entry in state.get(JUDGED_KEY) or ()}
    before = [message for message in _recent(state["messages"]) if message.id not in known]
    return [_judged(message) for message in (*before, *messages) if isinstance(message, AIMessage)]


def require_structure_of(messages: Sequence[BaseMessage], structure: Any) -> None:
    """Raise an `UnenforcedPolicyError` for a structured response that is made of none of these messages."""
    if structure is None:
        return
    sources: list[Any] = []
    for message in messages:
        if isinstance(message, AIMessage):
            sources += [call["args"] for call in message.tool_calls]
            with suppress(ValueError):
                sources.append(json.loads(str(message.text)))
    if not any(_is_read_from(source, structure) for source in sources):
        raise UnenforcedPolicyError(
            "another middleware has put a structured response in the place of the model's, which no guard has judged. "
            "Let the middleware change the message, and leave its structure to LangChain"
        )


def _is_read_from(source: Any, structure: Any) -> bool:
    """Whether a structure has this content and no other, apart from defaults that its class fills in."""
    if isinstance(structure, dict):  # the type of a typed dict is not known here, and may have read "1" as 1
        leaves = list(_leaves(source))
        return all(leaf in leaves or str(leaf) in map(str, leaves) for leaf in _leaves(structure))
    reads = TypeAdapter[Any](cast("type[Any]", type(structure)))
    try:
        read = reads.validate_python(source)
    except ValueError:
        return False
    if isinstance(structure, BaseModel):
        return read.model_dump(exclude_unset=True) == structure.model_dump(exclude_unset=True)
    return read == structure


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from _leaves(item)
    else:
        yield value


def judged_late(state: Mapping[str, Any], rules: Rules) -> dict[str, Any] | None:
    """The state's update for messages that came past the guard: each as it is delivered.

    A record that such a message carries counts if it was made for its text; other messages have no score. The target is
    not called, as its input is not known any more.

    Raises:
        LowConfidenceError: a message is withheld in mode "raise", or where a structured response is made of it.
    """
    if rules.terms.withholds:
        require_structure_of(_recent(state["messages"]), state.get("structured_response"))
    known = {entry["id"]: entry for entry in state.get(JUDGED_KEY) or ()}
    strangers = [message for message in _recent(state["messages"]) if not _is_judged(message, known.get(message.id))]
    if not strangers:
        return None
    if rules.terms.observes:
        for message in strangers:
            observe(rules, rules.draft(message, None, None))
        return {JUDGED_KEY: list(map(_judged, strangers))}
    changed = [without_record(message) if message.id in known else message for message in strangers]
    delivered = [_delivered(message, rules, state) for message in changed]
    return {"messages": delivered, JUDGED_KEY: list(map(_judged, delivered))}


def _delivered(message: AIMessage, rules: Rules, state: Mapping[str, Any]) -> AIMessage:
    owed = "A structured response is made of it." if state.get("structured_response") is not None else ""
    draft = replace(rules.draft(message, None, None), irreplaceable=owed)
    try:
        outcome = one(Pending([draft], replace(rules.terms, can_escalate=False)).outcomes())
    except LowConfidenceError as error:
        dispatch_custom_event(METADATA_KEY, error.verdict.metadata())
        raise
    dispatch_custom_event(METADATA_KEY, outcome.verdict.metadata())
    return rules.delivered(outcome, message).model_copy(update={"id": message.id, "name": message.name})


def _recent(messages: Sequence[BaseMessage]) -> list[AIMessage]:
    """The messages of models after the user's last one."""
    last = max((i for i, message in enumerate(messages) if isinstance(message, HumanMessage)), default=-1)
    return [message for message in messages[last + 1 :] if isinstance(message, AIMessage)]


def _judged(message: AIMessage) -> Judged:
    return Judged(id=message.id, digest=digest_of(str(message.text)), calls=[call["id"] for call in message.tool_calls])


def _is_judged(message: AIMessage, known: Judged | None) -> bool:
    """Whether a message is one that was judged. A person may have edited its calls since, or taken some out."""
    now = _judged(message)
    return known is not None and now["digest"] == known["digest"] and set(now["calls"]) <= set(known["calls"])
