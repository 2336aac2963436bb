"""LiteLLM's generic guardrail API: a gateway sends what its models wrote, and is told whether to let it through.

LiteLLM sends the conversation before the call and the answer after it, under one call id. What was asked is therefore
kept for a while, in memory. A withheld answer is blocked and not replaced: LiteLLM replaces the text alone, and would
deliver the log-probabilities of the draft beside the new words.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.adapters.reasoning import tells_reasoning
from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import Draft, Outcome, arun
from semgrad_guard.records import Message, Verdict
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.protocol import ChatMessage
from semgrad_guard.server.records import WITHHELD, public_record
from semgrad_guard.server.service import ServedModel, Service

PATH = "/beta/litellm_basic_guardrail_api"
_UNASKED = (
    "LiteLLM did not send the conversation of this answer; set mode: [pre_call, post_call] for this guardrail, so that "
    "it does"
)
_ASKED_TWICE = "LiteLLM sent two conversations under one call id"
_ELSEWHERE = ("the answer was written elsewhere",)
_OPTIONS_UNKNOWN = ("LiteLLM does not tell the options of the call (its temperature, say)",)
Rows = list[dict[str, Any]]


class GuardrailRequest(BaseModel):
    """The body of POST /beta/litellm_basic_guardrail_api. LiteLLM adds fields; some of them may tell of reasoning."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    input_type: Literal["request", "response"]
    texts: list[StrictStr] | None = Field(default=None, max_length=128)
    structured_messages: Rows | None = Field(default=None, max_length=10_000)
    tools: Rows | None = Field(default=None, max_length=512)
    tool_calls: Rows | None = Field(default=None, max_length=512)
    images: list[StrictStr] | None = Field(default=None, max_length=512)
    model: StrictStr | None = None
    litellm_call_id: StrictStr | None = Field(default=None, max_length=256)

    def asked(self) -> Asked | None:
        """The conversation, where it was sent; the reason why it cannot be read, where it cannot."""
        if not self.structured_messages:
            return None
        try:
            rows = [ChatMessage.model_validate(row) for row in self.structured_messages]
            form = AnswerForm.of({"tools": self.tools or []})
            turns = tuple(row.as_message(number) for number, row in enumerate(rows, start=1))
        except ValidationError:
            return Asked(reason="the conversation holds a turn that cannot be read")
        except InputError as error:
            return Asked(reason=str(error))
        return Asked(turns, form, size=sum(len(str(row)) for row in self.structured_messages))


class GuardrailAnswer(BaseModel):
    """What LiteLLM is told. `stream_holdback_chars` are the characters of each text that it may not deliver yet."""

    model_config = ConfigDict(frozen=True)

    action: Literal["NONE", "BLOCKED"] = "NONE"
    blocked_reason: str | None = None
    semgrad_guard: Rows | None = None
    stream_holdback_chars: list[int] | None = None

    def as_json(self) -> dict[str, Any]:
        """Without the fields that say nothing."""
        return self.model_dump(exclude={name for name, value in self if value is None})


@dataclass(frozen=True)
class Asked:
    """What a model was asked; `reason` says why it is not known. `size` is in characters."""

    conversation: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    reason: str | None = None
    size: int = 0

    @property
    def question(self) -> str | None:
        """The user's last words."""
        return next((turn.content for turn in reversed(self.conversation) if turn.role == "user"), None)


class Conversations:
    """What was asked under the latest call ids; the oldest go first. One id stands for one conversation."""

    def __init__(self, *, most: int = 10_000, characters: int = 50_000_000) -> None:
        self._most, self._characters = most, characters
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def remember(self, call_id: str, asked: Asked) -> None:
        """Keep what was asked. A client can choose its call id: another conversation under it makes it worth nothing,
        or answers could be judged by a question that they do not answer."""
        with self._lock:
            known = self._asked.pop(call_id, asked)
            self._size -= known.size if known is not asked else 0
            kept = asked if known == asked else Asked(reason=_ASKED_TWICE)
            self._asked[call_id] = kept
            self._size += kept.size
            while len(self._asked) > self._most or self._size > self._characters:
                self._size -= self._asked.popitem(last=False)[1].size

    def of(self, call_id: str | None) -> Asked:
        """What was asked under an id, as far as it is known."""
        with self._lock:
            return self._asked.get(call_id or "", Asked(reason=_UNASKED))


class LiteLLMGuardrail:
    """Judges for a gateway, by the served models' policies."""

    def __init__(self, service: Service) -> None:
        self._service, self._conversations = service, Conversations()

    async def answer(self, request: GuardrailRequest) -> GuardrailAnswer:
        """What LiteLLM is to do.

        Raises:
            HttpError: there are several models, and none of the name.
            SemGradGuardError: whatever scoring raises.
        """
        asked = request.asked()
        if request.input_type == "response":
            return await self._judged(request, asked or self._conversations.of(request.litellm_call_id))
        if asked is not None and request.litellm_call_id is not None:
            self._conversations.remember(request.litellm_call_id, asked)
        return GuardrailAnswer()

    async def _judged(self, request: GuardrailRequest, asked: Asked) -> GuardrailAnswer:
        served = self._served(request.model)
        facts = Facts(request_id=request.litellm_call_id, served=served.name, question=asked.question)
        terms = replace(self._service.terms(served, facts), can_escalate=False)
        found = await arun(terms, lambda: _drafts(served, request, asked), _nobody, stop=terms.stop())
        verdicts = [_verdict(each) for each in found]
        records = [public_record(verdict, scores=served.scores) for verdict in verdicts]
        if withheld := [verdict for verdict, out in zip(verdicts, found, strict=True) if _is_withheld(out)]:
            return GuardrailAnswer(action="BLOCKED", blocked_reason=_reason(withheld[0], asked), semgrad_guard=records)
        held = [len(text) for text in request.texts or ()] if terms.withholds else None
        return GuardrailAnswer(semgrad_guard=records, stream_holdback_chars=held or None)

    def _served(self, name: str | None) -> ServedModel:
        """The model of that name, or the only one: LiteLLM's names are its own."""
        models = self._service.models
        return self._service.model(name if name in models or len(models) > 1 else None)


async def _drafts(served: ServedModel, request: GuardrailRequest, asked: Asked) -> Sequence[Draft[Answer]]:
    """Every text with its score; what else there is cannot have one, and is named where a text would stand."""
    drafts = [await _draft(served, text, request, asked) for text in request.texts or ()]
    for there, said in ((request.tool_calls, "a tool call"), (request.images, "an image")):
        if there:
            scored = await served.scheduler.unscored(said, f"{said} from elsewhere cannot be scored", asked.form)
            drafts.append(Draft(scored.verdict, Answer(text="")))
    return drafts


async def _draft(served: ServedModel, text: str, request: GuardrailRequest, asked: Asked) -> Draft[Answer]:
    scheduler = served.scheduler
    if asked.reason is not None:
        scored = await scheduler.unscored(text, asked.reason, asked.form)
    else:
        reasoned = tells_reasoning(request.model_extra)
        scored = await scheduler.scored(asked.conversation, text, form=asked.form, reasoned=reasoned)
    strange = _OPTIONS_UNKNOWN if scheduler.served else _ELSEWHERE
    return Draft(scored.verdict, Answer(text=text), scored.prompt, strange=strange)


async def _nobody(_: Sequence[Any]) -> Sequence[Any]:
    return ()  # nothing waits: these terms escalate nothing


def _verdict(found: Outcome[Answer] | Exception) -> Verdict:
    if isinstance(found, Outcome):
        return found.verdict
    if isinstance(found, LowConfidenceError):
        return found.verdict
    raise found


def _is_withheld(found: Outcome[Answer] | Exception) -> bool:
    return isinstance(found, Exception) or found.answer is None


def _reason(verdict: Verdict, asked: Asked) -> str:
    """Why an answer is blocked, in words that a gateway shows to its clients: nothing of them depends on the answer."""
    decision = "" if verdict.decision_id is None else f" (decision {verdict.decision_id})"
    return f"{WITHHELD}{'' if asked.reason is None else f': {asked.reason}'}{decision}"
