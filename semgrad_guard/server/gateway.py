"""LiteLLM's generic guardrail API: a gateway sends its models' answers, and learns whether to let them through.

LiteLLM sends the conversation before the call and the answer after it, under one call id. Conversations are therefore
kept for a while, in memory. A withheld answer is blocked and not replaced: LiteLLM replaces the text alone, and would
deliver the log-probabilities of the draft next to the new text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from semgrad_guard.adapters.calls import AnswerForm, reasoning_of
from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import Draft, Outcome, arun
from semgrad_guard.records import Message, Verdict
from semgrad_guard.server.answers import WITHHELD, Answer, public_record
from semgrad_guard.server.protocol import ChatMessage
from semgrad_guard.server.service import ServedModel, Service
from semgrad_guard.server.writing import ForeignText

PATH = "/beta/litellm_basic_guardrail_api"
_NO_CONVERSATION = (
    "LiteLLM did not send the conversation of this answer; set mode: [pre_call, post_call] for this guardrail, so that "
    "it does"
)
_TWO_CONVERSATIONS = "LiteLLM sent two conversations under one call id"
_ELSEWHERE = ("the answer was written elsewhere",)
_OPTIONS_UNKNOWN = ("LiteLLM does not send the options of the call (its temperature, for instance)",)
Rows = list[dict[str, Any]]


class GuardrailRequest(BaseModel):
    """The body of POST /beta/litellm_basic_guardrail_api. LiteLLM adds fields; some of them may show reasoning."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    input_type: Literal["request", "response"]
    texts: list[StrictStr] | None = Field(default=None, max_length=128)
    structured_messages: Rows | None = Field(default=None, max_length=10_000)
    tools: Rows | None = Field(default=None, max_length=512)
    tool_calls: Rows | None = Field(default=None, max_length=512)
    images: list[StrictStr] | None = Field(default=None, max_length=512)
    model: StrictStr | None = None
    litellm_call_id: StrictStr | None = Field(default=None, max_length=256)

    def conversation(self) -> Conversation | None:
        """The conversation, where it was sent; with a reason, where it cannot be read."""
        if not self.structured_messages:
            return None
        try:
            rows = [ChatMessage.model_validate(row) for row in self.structured_messages]
            form = AnswerForm.of({"tools": self.tools or []})
            messages = tuple(row.as_message(number) for number, row in enumerate(rows))
        except ValidationError:
            return Conversation(reason="the conversation holds a message that cannot be read")
        except InputError as error:
            return Conversation(reason=str(error))
        return Conversation(messages, form, size=sum(len(str(row)) for row in self.structured_messages))


class GuardrailAnswer(BaseModel):
    """The answer to LiteLLM. `stream_holdback_chars` are the characters of each text that it may not deliver yet."""

    model_config = ConfigDict(frozen=True)

    action: Literal["NONE", "BLOCKED"] = "NONE"
    blocked_reason: str | None = None
    semgrad_guard: Rows | None = None
    stream_holdback_chars: list[int] | None = None

    def as_json(self) -> dict[str, Any]:
        """Without the fields that are None."""
        return self.model_dump(exclude={name for name, value in self if value is None})


@dataclass(frozen=True)
class Conversation:
    """A conversation with a model; `reason` where it is not known. `size` is in characters."""

    messages: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    reason: str | None = None
    size: int = 0

    @property
    def question(self) -> str | None:
        """The user's last message."""
        return next((message.content for message in reversed(self.messages) if message.role == "user"), None)


class Conversations:
    """The conversations of the latest call ids; the oldest are dropped first. One id is for one conversation."""

    def __init__(self, *, most: int = 10_000, characters: int = 50_000_000) -> None:
        self._most, self._characters = most, characters
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def remember(self, call_id: str, conversation: Conversation) -> None:
        """Keep a conversation. A client can choose its call id: a second conversation under it invalidates both, or
        answers could be judged by a question that they do not answer."""
        with self._lock:
            earlier = self._known.pop(call_id, None)
            self._size -= 0 if earlier is None else earlier.size
            same = earlier is None or earlier == conversation
            kept = conversation if same else Conversation(reason=_TWO_CONVERSATIONS)
            self._known[call_id] = kept
            self._size += kept.size
            while len(self._known) > self._most or self._size > self._characters:
                self._size -= self._known.popitem(last=False)[1].size

    def of(self, call_id: str | None) -> Conversation:
        """The conversation of a call id, as far as it is known."""
        with self._lock:
            return self._known.get(call_id or "", Conversation(reason=_NO_CONVERSATION))


class LiteLLMGuardrail:
    """Judges for a gateway, by the served models' policies."""

    def __init__(self, service: Service) -> None:
        self._service, self._conversations = service, Conversations()

    async def answer(self, request: GuardrailRequest) -> GuardrailAnswer:
        """Whether LiteLLM is to let the answer through.

        Raises:
            HttpError: there are several models, and none of the name.
            SemGradGuardError: any error of scoring.
        """
        conversation = request.conversation()
        if request.input_type == "response":
            return await self._judged(request, conversation or self._conversations.of(request.litellm_call_id))
        if conversation is not None and request.litellm_call_id is not None:
            self._conversations.remember(request.litellm_call_id, conversation)
        return GuardrailAnswer()

    async def _judged(self, request: GuardrailRequest, conversation: Conversation) -> GuardrailAnswer:
        models, name = self._service.models, request.model  # LiteLLM's names are its own
        served = self._service.model(name if name in models or len(models) > 1 else None)
        if served.delivers_parts:
            raise InputError(
                "a gateway's answers go out whole or not at all, and this server judges by sentence; serve one with "
                "--by answer for the gateway"
            )
        facts = Facts(request_id=request.litellm_call_id, served=served.name, question=conversation.question)
        terms = replace(self._service.terms(served, facts), can_escalate=False)
        outcomes = await arun(terms, lambda: _drafts(served, request, conversation), stop=terms.stop())
        verdicts = [_verdict(outcome) for outcome in outcomes]
        records = [public_record(verdict, scores=served.scores) for verdict in verdicts]
        for verdict, outcome in zip(verdicts, outcomes, strict=True):
            if isinstance(outcome, Exception) or outcome.answer is None:
                reason = _reason(verdict, conversation)
                return GuardrailAnswer(action="BLOCKED", blocked_reason=reason, semgrad_guard=records)
        held = [len(text) for text in request.texts or ()] if terms.withholds else None
        return GuardrailAnswer(semgrad_guard=records, stream_holdback_chars=held or None)


async def _drafts(
    served: ServedModel, request: GuardrailRequest, conversation: Conversation
) -> Sequence[Draft[Answer]]:
    """Every text with its score; calls and images cannot have one, and are named in the place of a text."""
    scheduler, drafts = served.scheduler, list[Draft[Answer]]()
    strange = _OPTIONS_UNKNOWN if scheduler.served else _ELSEWHERE
    for text in request.texts or ():
        foreign = ForeignText(
            text=text,
            conversation=conversation.messages,
            form=conversation.form,
            reasoning=reasoning_of(request.model_extra),
            reason=conversation.reason,
        )
        scored = await scheduler.judged(foreign)
        drafts.append(Draft(scored.verdict, Answer(text=text), scored.prompt, strange=strange))
    for there, name in ((request.tool_calls, "a tool call"), (request.images, "an image")):
        if there:
            reason = f"{name} from elsewhere cannot be scored"
            scored = await scheduler.judged(ForeignText(text=name, form=conversation.form, reason=reason))
            drafts.append(Draft(scored.verdict, Answer(text="")))
    return drafts


def _verdict(outcome: Outcome[Answer] | Exception) -> Verdict:
    if isinstance(outcome, (Outcome, LowConfidenceError)):
        return outcome.verdict
    raise outcome


def _reason(verdict: Verdict, conversation: Conversation) -> str:
    """The reason of a blocked answer, which a gateway shows to its clients: it does not depend on the answer."""
    decision = "" if verdict.decision_id is None else f" (decision {verdict.decision_id})"
    return f"{WITHHELD}{'' if conversation.reason is None else f': {conversation.reason}'}{decision}"
