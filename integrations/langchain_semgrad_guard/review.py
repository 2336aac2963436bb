"""`HumanReview`: what a person is asked about an answer that is not let through, and what becomes of their decision.

The words are those of LangChain's own `HumanInTheLoopMiddleware`, so that its user interfaces work here as well. A text
is reviewed as an action called "answer", tool calls as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from langchain_core.messages import AIMessage, ToolCall
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Rules
from semgrad_guard import METADATA_KEY, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Escalate, Refusal, Reply, by_a_person, conclude

DecisionType = Literal["approve", "edit", "reject"]

ANSWER = "answer"
"""The action that stands for a text: `{"name": "answer", "args": {"text": ...}}`."""

_SHAPE = (
    '{"decisions": [...]} with one entry for each action request, in order: {"type": "approve"}, '
    '{"type": "edit", "edited_action": {"name": ..., "args": {...}}} or {"type": "reject", "message": ...}'
)


@dataclass(frozen=True, kw_only=True)
class HumanReview:
    """An escalation target: a person, asked by an interrupt of the agent's graph.

    Args:
        allowed_decisions: what the person may do: approve the answer, edit it, reject it.
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
            InputError: the answer has another shape, or decides what is not allowed.
        """
        said = self._said(draft, verdict, self._decisions(answer, len(_actions(draft))))
        return rules.delivered(conclude(Escalate(verdict), draft, rules.terms, said=said), draft)

    def _said(
        self, draft: AIMessage, verdict: Verdict, decisions: Sequence[_Approve | _Edit | _Reject]
    ) -> Reply[AIMessage] | Refusal:
        rejection = next((each for each in decisions if each.type == "reject"), None)
        if rejection is not None:
            return Refusal("rejected by a person", rejection.message)
        if all(each.type == "approve" for each in decisions):
            approved = draft.model_copy(update={"usage_metadata": None})  # what it cost is counted once, as the draft's
            return Reply(by_a_person(verdict, convert.message_text(draft), "approved by a person"), approved)
        text, calls = _edited(draft, decisions)
        edited = convert.textless(draft).model_copy(
            update={"content": text, "tool_calls": calls, "usage_metadata": None}
        )
        return Reply(by_a_person(verdict, text, "edited by a person"), edited)

    def _decisions(self, answer: Any, count: int) -> Sequence[_Approve | _Edit | _Reject]:
        try:
            decisions = _Answer.model_validate(answer).decisions
        except ValidationError as error:
            raise InputError(f"a review is answered by {_SHAPE}, not by {answer!r}: {error}") from error
        if len(decisions) != count:
            raise InputError(f"{count} actions were to be reviewed and {len(decisions)} decisions came: send {_SHAPE}")
        for decision in decisions:
            if decision.type not in self.allowed_decisions:
                raise InputError(f"{decision.type!r} is not allowed here, only {', '.join(self.allowed_decisions)}")
        return decisions


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


class _Answer(_Strict):
    decisions: list[Annotated[_Approve | _Edit | _Reject, Field(discriminator="type")]]


def _actions(draft: AIMessage) -> list[dict[str, Any]]:
    if not draft.tool_calls:
        return [{"name": ANSWER, "args": {"text": convert.message_text(draft)}}]
    return [{"name": call["name"], "args": call["args"]} for call in draft.tool_calls]


def _edited(draft: AIMessage, decisions: Sequence[_Approve | _Edit | _Reject]) -> tuple[str, list[ToolCall]]:
    """The text and the tool calls after the person's edits."""
    if draft.tool_calls:
        pairs = zip(draft.tool_calls, decisions, strict=True)
        return convert.message_text(draft), [_changed(call, decision) for call, decision in pairs]
    action = cast("_Edit", decisions[0]).edited_action
    text = action.args.get("text")
    if action.name != ANSWER or set(action.args) != {"text"} or not isinstance(text, str):
        raise InputError(f"an edited answer is {{'name': {ANSWER!r}, 'args': {{'text': ...}}}}, not {action!r}")
    return text, []


def _changed(call: ToolCall, decision: _Approve | _Edit | _Reject) -> ToolCall:
    if not isinstance(decision, _Edit):
        return call
    return ToolCall(name=decision.edited_action.name, args=decision.edited_action.args, id=call["id"], type="tool_call")
