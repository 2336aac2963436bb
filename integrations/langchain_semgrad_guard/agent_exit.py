"""The exit of an agent's guard: which messages carry a decision, and what becomes of those that carry none."""

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
"""Where an agent's state keeps which messages are judged."""

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


def says_the_same(message: AIMessage, other: AIMessage) -> bool:
    """Whether two messages have the same text and the same calls."""
    return (
        str(message.text) == str(other.text)
        and _calls(message) == _calls(other)
        and message.invalid_tool_calls == other.invalid_tool_calls
    )


def carries(message: AIMessage, delivered: AIMessage) -> bool:
    """Whether a message is the one that a guard has delivered, with the decision about it."""
    mine, other = (each.response_metadata.get(METADATA_KEY) for each in (message, delivered))
    return mine == other and says_the_same(message, delivered)


def without_record(message: AIMessage) -> AIMessage:
    """A message without the record of what it was before somebody changed it."""
    kept = {name: value for name, value in message.response_metadata.items() if name != METADATA_KEY}
    return message.model_copy(update={"response_metadata": kept})


def as_judged(messages: Sequence[BaseMessage], state: Mapping[str, Any]) -> list[Judged]:
    """What the state keeps of the messages of one turn; what stood in the conversation before it is nobody's here."""
    known = {each["id"] for each in state.get(JUDGED_KEY) or ()}
    before = [message for message in _recent(state["messages"]) if message.id not in known]
    return [_judged(message) for message in (*before, *messages) if isinstance(message, AIMessage)]


def require_structure_of(messages: Sequence[BaseMessage], structure: Any) -> None:
    """Raise an `UnenforcedPolicyError` for a structured response that is made of none of these messages."""
    if structure is None:
        return
    told = [each for message in messages if isinstance(message, AIMessage) for each in _structures(message)]
    if not any(_is_read_from(each, structure) for each in told):
        raise UnenforcedPolicyError(
            "another middleware has put a structured response in the place of the model's: nobody has judged it. Let "
            "the middleware change the message, and leave its structure to LangChain"
        )


def _structures(message: AIMessage) -> list[Any]:
    """All that a structured response can be read from: the arguments of calls, and a text of JSON."""
    found: list[Any] = [call["args"] for call in message.tool_calls]
    with suppress(ValueError):
        found.append(json.loads(str(message.text)))
    return found


def _is_read_from(told: Any, structure: Any) -> bool:
    """Whether it says this and nothing else. Fields that a class fills in by itself are nobody's words."""
    if isinstance(structure, dict):  # of a typed dict nobody knows the type here, which may have read "1" as 1
        leaves = list(_leaves(told))
        return all(leaf in leaves or str(leaf) in map(str, leaves) for leaf in _leaves(structure))
    reads = TypeAdapter[Any](cast("type[Any]", type(structure)))
    try:
        return _set(reads.validate_python(told)) == _set(structure)
    except ValueError:
        return False


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in cast("dict[str, Any]", value).values():
            yield from _leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in cast("list[Any]", value):
            yield from _leaves(each)
    else:
        yield value


def _set(structure: Any) -> Any:
    return structure.model_dump(exclude_unset=True) if isinstance(structure, BaseModel) else structure


def judged_late(state: Mapping[str, Any], rules: Rules) -> dict[str, Any] | None:
    """The state's update for messages that came past the guard: each as it is delivered.

    A record that such a message carries counts, if it was made for its text; others have no score. No target is asked:
    what it would be asked is not known any more.

    Raises:
        LowConfidenceError: a message is withheld in mode "raise", or where a structured response is made of it.
    """
    if rules.terms.withholds:
        require_structure_of(_recent(state["messages"]), state.get("structured_response"))
    judged = {each["id"]: each for each in state.get(JUDGED_KEY) or ()}
    strangers = [each for each in _recent(state["messages"]) if not _is_judged(each, judged.get(each.id))]
    if not strangers:
        return None
    if rules.terms.mode == "observe":
        for message in strangers:
            observe(rules, rules.draft(message, None, None))
        return {JUDGED_KEY: [_judged(message) for message in strangers]}
    changed = [without_record(each) if each.id in judged else each for each in strangers]
    said = [_delivered(message, rules, state) for message in changed]
    return {"messages": said, JUDGED_KEY: [_judged(message) for message in said]}


def _delivered(message: AIMessage, rules: Rules, state: Mapping[str, Any]) -> AIMessage:
    owed = "A structured response is made of it." if state.get("structured_response") is not None else ""
    terms = replace(rules.terms, can_escalate=False)
    draft = replace(rules.draft(message, None, None), irreplaceable=owed)
    try:
        outcome = one(Pending([draft], terms).outcomes())
    except LowConfidenceError as error:
        dispatch_custom_event(METADATA_KEY, error.verdict.metadata())
        raise
    dispatch_custom_event(METADATA_KEY, outcome.verdict.metadata())
    return rules.delivered(outcome, message).model_copy(update={"id": message.id, "name": message.name})


def _recent(messages: Sequence[BaseMessage]) -> list[AIMessage]:
    """The messages of models since the user has spoken."""
    found: list[AIMessage] = []
    for message in reversed(messages):
        if isinstance(message, HumanMessage):
            break
        if isinstance(message, AIMessage):
            found.append(message)
    return found[::-1]


def _judged(message: AIMessage) -> Judged:
    return Judged(id=message.id, digest=digest_of(str(message.text)), calls=[call["id"] for call in message.tool_calls])


def _is_judged(message: AIMessage, known: Judged | None) -> bool:
    """Whether a message is one that was judged. A person may have edited its calls since, or taken some out."""
    now = _judged(message)
    return known is not None and now["digest"] == known["digest"] and set(now["calls"]) <= set(known["calls"])


def _calls(message: AIMessage) -> list[tuple[str, dict[str, Any], str | None]]:
    return [(call["name"], call["args"], call["id"]) for call in message.tool_calls]
