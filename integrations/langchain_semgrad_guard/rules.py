"""`Rules`: what a router, a guard or a middleware has been told; drafts and outcomes as LangChain's messages."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_core.messages import AIMessage, BaseMessage

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.targets import Target, is_escalating
from semgrad_guard import Verdict
from semgrad_guard.guard import Draft, Outcome, Terms, as_draft, unscored
from semgrad_guard.records import PromptForm

NO_SCORE = "the answer carries no score"


@dataclass(frozen=True, eq=False)
class Rules:
    """How a run's answer is judged, and who is asked for what is not let through.

    `owner` is the router (or guard) itself: one that is attached twice is one. A message that calls none but
    `trusted_tools` may do so whatever its score. `irreplaceable` says why no text can stand in for a withheld message,
    where that is so.
    """

    owner: object
    terms: Terms
    target: Target | None = None
    trusted_tools: frozenset[str] = frozenset()
    irreplaceable: str = ""

    def draft(self, message: AIMessage, prompt: PromptForm | None, source: str | None) -> Draft[AIMessage]:
        """A message as a draft to be judged. One that carries no record is unscored."""
        called = {call["name"] for call in message.tool_calls}
        return Draft(
            draft_verdict(message),
            message,
            prompt,
            trusted=bool(called) and called <= self.trusted_tools,
            can_escalate=not is_escalating(self.owner),
            irreplaceable=self.irreplaceable,
            source=source,
        )

    def delivered(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> AIMessage:
        """The message that goes out."""
        verdict, keep_draft = outcome.verdict, self.terms.keep_draft
        if outcome.answer is None:
            return convert.abstention(draft or AIMessage(""), verdict, keep_draft=keep_draft)
        if draft is None or outcome.answer is not draft:
            return convert.escalation(outcome.answer, verdict, draft or AIMessage(""), keep_draft=keep_draft)
        delivered = convert.decided(draft, verdict, keep_draft=keep_draft)
        if verdict.text != convert.message_text(draft):  # its calls go out, its text does not
            delivered = convert.without_text(delivered)
        return delivered


def draft_verdict(message: BaseMessage) -> Verdict:
    """The undecided verdict on a message."""
    recorded = convert.stage_verdict(message)
    return unscored(convert.message_text(message), reason=NO_SCORE) if recorded is None else as_draft(recorded)
