"""A message on its way to a person and back, as an agent's state keeps it: plain JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage, message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from langchain_semgrad_guard.answers import Rules, TargetReply, TargetRequest
from langchain_semgrad_guard.hearing import AloudChatModel
from langchain_semgrad_guard.messages import as_chunk
from langchain_semgrad_guard.review import HumanReview
from semgrad_guard import Verdict
from semgrad_guard.guard import Refusal

REVIEW_KEY = "semgrad_guard_review"
"""Where the state keeps it."""

Review = dict[str, Any]
"""While it waits: placeholder, draft and verdict. Once a person has decided: settled, and the question it answers."""


@dataclass
class ReviewDesk:
    """A target that answers later. The model's run ends with an empty message, and the draft is put away here."""

    held: list[TargetRequest] = field(default_factory=list[TargetRequest])

    def ask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """Put the drafts away."""
        self.held += requests
        return [Refusal("waits for a person", message="") for _ in requests]

    async def aask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]:
        """Like `ask`."""
        return self.ask(requests)

    def opened(self, placeholder: AIMessage, draft: AIMessage | None) -> Review | None:
        """The review of a draft that was put away, whose place an empty message holds: no hook acts on an older one."""
        held = next((each for each in self.held if each.draft is draft), None)
        if held is None:
            return None
        kept = {"draft": message_to_dict(held.draft), "verdict": held.verdict.model_dump(mode="json")}
        return {"placeholder": placeholder.id, **kept}


def question_of(review: Review, person: HumanReview) -> dict[str, Any]:
    """What the person is asked."""
    return person.request(*_draft(review))


def settled(
    review: Review, person: HumanReview, answer: Any, history: Sequence[BaseMessage], rules: Rules
) -> dict[str, Any]:
    """The state's update after the person's answer: the model node is to say the message that came of it.

    Raises:
        InputError: see `HumanReview.settle`.
    """
    message = person.settle(*_draft(review), answer, rules)
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


class SettledModel(AloudChatModel):
    """Says the one message that a person has decided on, or that somebody else has made.

    The decision comes in a later step of the graph than the model's run. What was decided must run its tools, be parsed
    and be streamed like any message of the agent's model, and all of that hangs on a run of a chat model.
    """

    message: AIMessage

    @classmethod
    def of(cls, message: AIMessage, model: BaseChatModel) -> SettledModel:
        """A model that says this message in another's place."""
        named = message.model_copy(update={"id": None})
        return cls(message=named, cache=False, verbose=False, profile=model.profile, name=model.get_name())

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard-settled"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Whatever tools there are, the message stays the same."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.message.model_copy())])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=as_chunk(self.message))


def _draft(review: Review) -> tuple[AIMessage, Verdict]:
    return _from_json(review["draft"]), Verdict.model_validate(review["verdict"])


def _from_json(record: dict[str, Any]) -> AIMessage:
    return cast("AIMessage", messages_from_dict([record])[0])


def _question_id(history: Sequence[BaseMessage]) -> str | None:
    """The id of the user's last message."""
    return next((message.id for message in reversed(history) if message.type == "human"), None)
