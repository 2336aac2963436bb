"""A message on its way to a person and back, as an agent's state keeps it: plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from uuid import uuid4

from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage, message_to_dict, messages_from_dict

from langchain_semgrad_guard.review import HumanReview
from semgrad_guard import METADATA_KEY, Verdict

REVIEW_KEY = "semgrad_guard_review"
"""Where the state keeps it."""

Review = dict[str, Any]
"""While it waits: placeholder, draft and verdict. Once a person has decided: settled, and the question it answers."""


def opened(draft: AIMessage, verdict: Verdict) -> tuple[AIMessage, Review]:
    """An empty message to stand in the draft's place, so that no hook acts on an older one, and the draft, put away."""
    metadata = {METADATA_KEY: verdict.metadata()}
    placeholder = AIMessage(content="", id=f"review-{uuid4()}", response_metadata=metadata)
    kept = {"draft": message_to_dict(draft), "verdict": verdict.model_dump(mode="json")}
    return placeholder, {"placeholder": placeholder.id, **kept}


def question_of(review: Review, person: HumanReview) -> dict[str, Any]:
    """What the person is asked."""
    return person.request(*_draft(review))


def settled(
    review: Review, person: HumanReview, answer: Any, history: Sequence[BaseMessage], **words: Any
) -> dict[str, Any]:
    """The state's update after the person's answer: the model node is to say the message that came of it.

    Raises:
        InputError: see `HumanReview.settle`, which also takes the `words`.
    """
    message = person.settle(*_draft(review), answer, **words)
    return {
        "messages": [RemoveMessage(id=review["placeholder"])],
        REVIEW_KEY: {"settled": message_to_dict(message), "question": _question_id(history)},
        "jump_to": "model",
    }


def settled_message(review: Review | None, history: Sequence[BaseMessage]) -> AIMessage | None:
    """What a person has decided about the question at hand.

    None if they have not, or if it could not be delivered then and the user went on to something new.
    """
    if review is None or "settled" not in review or review["question"] != _question_id(history):
        return None
    return _from_json(review["settled"])


def closing(review: Review) -> dict[str, Any]:
    """The state's update that forgets a review; one that was never answered leaves its placeholder."""
    forgotten: dict[str, Any] = {REVIEW_KEY: None}
    if "placeholder" in review:
        forgotten["messages"] = [RemoveMessage(id=review["placeholder"])]
    return forgotten


def _draft(review: Review) -> tuple[AIMessage, Verdict]:
    return _from_json(review["draft"]), Verdict.model_validate(review["verdict"])


def _from_json(record: dict[str, Any]) -> AIMessage:
    return cast("AIMessage", messages_from_dict([record])[0])


def _question_id(history: Sequence[BaseMessage]) -> str | None:
    """The id of the user's last message."""
    return next((message.id for message in reversed(history) if message.type == "human"), None)
