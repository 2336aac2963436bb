"""`HumanReview`: a person decides about an answer that is not let through; and the review in an agent's state.

The words are those of LangChain's own `HumanInTheLoopMiddleware`, so that its user interfaces work here as well. A text
is reviewed as an action called "answer", tool calls as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    RemoveMessage,
    ToolCall,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.messages.tool import tool_call
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Rules, TargetReply, TargetRequest
from semgrad_guard import METADATA_KEY, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Escalate, Refusal, Reply, by_a_person, conclude

DecisionType = Literal["approve", "edit", "reject"]

ANSWER = "answer"
"""The action for a text: `{"name": "answer", "args": {"text": ...}}`."""

REVIEW_KEY = "semgrad_guard_review"
"""The state's key of a review."""

Review = dict[str, Any]
"""While it waits: placeholder, draft and verdict. After the decision: the settled message, and its question's id."""

_SHAPE = (
    '{"decisions": [...]} with one entry for each action request, in order: {"type": "approve"}, '
    '{"type": "edit", "edited_action": {"name": ..., "args": {...}}} or {"type": "reject", "message": ...}'
)


@dataclass(frozen=True, kw_only=True)
class HumanReview:
    """An escalation target: a person, reached by an interrupt of the agent's graph.

    Args:
        allowed_decisions: the decisions that the person may take: approve the answer, edit it, reject it.
        description: shown to the person in place of the reason why the answer is not let through.
    """

    allowed_decisions: tuple[DecisionType, ...] = ("approve", "edit", "reject")
    description: str | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.allowed_decisions) - set(get_args(DecisionType)))
        if unknown or not self.allowed_decisions:
            raise InputError(f"allowed_decisions are some of 'approve', 'edit' and 'reject', not {unknown or 'none'}")

    def request(self, draft: AIMessage, verdict: Verdict) -> dict[str, Any]:
        """The value of the interrupt: plain JSON, in the shape of LangChain's `HITLRequest`."""
        actions = _actions(draft)
        description = self.description or verdict.reason or "the answer is not let through"
        return {
            "action_requests": [{**action, "description": description} for action in actions],
            "review_configs": [
                {"action_name": name, "allowed_decisions": list(self.allowed_decisions)}
                for name in dict.fromkeys(action["name"] for action in actions)
            ],
            METADATA_KEY: verdict.metadata(),
        }

    def settle(self, draft: AIMessage, verdict: Verdict, answer: Any, rules: Rules) -> AIMessage:
        """The message to deliver after the person's answer; one rejection withholds all of it.

        Raises:
            InputError: the answer has another shape, or a decision that is not allowed.
        """
        try:
            decisions = _Answer.model_validate(answer).decisions
        except ValidationError as error:
            raise InputError(f"a review is answered by {_SHAPE}, not by {answer!r}: {error}") from error
        if len(decisions) != (count := len(_actions(draft))):
            raise InputError(f"{count} actions were to be reviewed and {len(decisions)} decisions came: send {_SHAPE}")
        for decision in decisions:
            if decision.type not in self.allowed_decisions:
                raise InputError(f"{decision.type!r} is not allowed here, only {', '.join(self.allowed_decisions)}")
        reply = _reply(draft, verdict, decisions)
        return rules.delivered(conclude(Escalate(verdict), draft, rules.terms, reply=reply), draft)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Action(_Strict):
    name: str
    args: dict[str, Any]


class _Approve(_Strict):
    type: Literal["approve"]


class _Edit(_Strict):
    type: Literal["edit"]
    edited_action: _Action


class _Reject(_Strict):
    type: Literal["reject"]
    message: str | None = None
    """Delivered in place of the abstain message."""


_Decision = _Approve | _Edit | _Reject


class _Answer(_Strict):
    decisions: list[Annotated[_Decision, Field(discriminator="type")]]


def _actions(draft: AIMessage) -> list[dict[str, Any]]:
    if not draft.tool_calls:
        return [{"name": ANSWER, "args": {"text": convert.message_text(draft)}}]
    return [{"name": call["name"], "args": call["args"]} for call in draft.tool_calls]


def _reply(draft: AIMessage, verdict: Verdict, decisions: Sequence[_Decision]) -> Reply[AIMessage] | Refusal:
    rejection = next((decision for decision in decisions if decision.type == "reject"), None)
    if rejection is not None:
        return Refusal("rejected by a person", rejection.message)
    if all(decision.type == "approve" for decision in decisions):
        approved = draft.model_copy(update={"usage_metadata": None})  # its tokens are counted once, as the draft's
        return Reply(by_a_person(verdict, convert.message_text(draft), "approved by a person"), approved)
    text, calls = _edited(draft, decisions)
    changes = {"content": text, "tool_calls": calls, "usage_metadata": None}
    return Reply(by_a_person(verdict, text, "edited by a person"), convert.textless(draft).model_copy(update=changes))


def _edited(draft: AIMessage, decisions: Sequence[_Decision]) -> tuple[str, list[ToolCall]]:
    """The text and the tool calls after the person's edits."""
    if draft.tool_calls:
        calls = [
            tool_call(name=decision.edited_action.name, args=decision.edited_action.args, id=call["id"])
            if isinstance(decision, _Edit)
            else call
            for call, decision in zip(draft.tool_calls, decisions, strict=True)
        ]
        return convert.message_text(draft), calls
    action = cast("_Edit", decisions[0]).edited_action
    text = action.args.get("text")
    if action.name != ANSWER or set(action.args) != {"text"} or not isinstance(text, str):
        raise InputError(f"an edited answer is {{'name': {ANSWER!r}, 'args': {{'text': ...}}}}, not {action!r}")
    return text, []


# A review in an agent's state: plain JSON.


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
        """The review of a draft that was put away. Its placeholder is empty: no hook acts on an older message."""
        held = next((request for request in self.held if request.draft is draft), None)
        if held is None:
            return None
        kept = {"draft": message_to_dict(held.draft), "verdict": held.verdict.model_dump(mode="json")}
        return {"placeholder": placeholder.id, **kept}


def question_of(review: Review, person: HumanReview) -> dict[str, Any]:
    """The question to the person."""
    return person.request(_message(review["draft"]), Verdict.model_validate(review["verdict"]))


def settled(
    review: Review, person: HumanReview, answer: Any, history: Sequence[BaseMessage], rules: Rules
) -> dict[str, Any]:
    """The state's update after the person's answer: the model node delivers the message that it made.

    Raises:
        InputError: see `HumanReview.settle`.
    """
    verdict = Verdict.model_validate(review["verdict"])
    message = person.settle(_message(review["draft"]), verdict, answer, rules)
    return {
        "messages": [RemoveMessage(id=review["placeholder"])],
        REVIEW_KEY: {"settled": message_to_dict(message), "question": _question_id(history)},
        "jump_to": "model",
    }


def settled_message(review: Review | None, history: Sequence[BaseMessage]) -> AIMessage | None:
    """A person's decision about the current question.

    None without one, or if it could not be delivered then and the user has continued with another question.
    """
    if review is None or "settled" not in review or review["question"] != _question_id(history):
        return None
    return _message(review["settled"])


def closing(review: Review) -> dict[str, Any]:
    """The state's update that forgets a review; one that was never answered leaves its placeholder."""
    forgotten: dict[str, Any] = {REVIEW_KEY: None}
    if "placeholder" in review:
        forgotten["messages"] = [RemoveMessage(id=review["placeholder"])]
    return forgotten


def _message(record: dict[str, Any]) -> AIMessage:
    return cast("AIMessage", messages_from_dict([record])[0])


def _question_id(history: Sequence[BaseMessage]) -> str | None:
    """The id of the user's last message."""
    return next((message.id for message in reversed(history) if message.type == "human"), None)
