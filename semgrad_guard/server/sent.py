"""What other servers send: as much of OpenAI's protocol as is read here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from semgrad_guard.adapters.reasoning import tells_reasoning


class Sent(BaseModel):
    """What another server sends; what is not read here is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SentFunction(Sent):
    """A call, or what is known of it so far."""

    id: StrictStr = ""
    name: StrictStr = ""
    arguments: StrictStr = ""


class SentNames(Sent):
    """What is called, and with what; pieces of it in a stream."""

    name: StrictStr | None = None
    arguments: StrictStr | None = None


class SentCall(Sent):
    """A call, or a piece of one."""

    index: StrictInt | None = None
    id: StrictStr | None = None
    function: SentNames | None = None


class SentMessage(Sent):
    """An answer, or a piece of one. A call in the form that came before `tool_calls` would be lost: it is refused.

    Servers have many names for reasoning, and several forms: further fields are kept to be looked at.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    content: StrictStr | None = None
    refusal: StrictStr | None = None
    tool_calls: list[SentCall] | None = None
    function_call: None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @property
    def thought(self) -> str | None:
        """Its reasoning; "" where it is known that there was some, None where nothing says so."""
        texts = (each for each in (self.reasoning_content, self.reasoning, self.thinking) if isinstance(each, str))
        return next(filter(None, texts), None) or ("" if tells_reasoning(dict(self)) else None)


class SentLogprobs(Sent):
    """Log-probabilities in OpenAI's form; they are passed on."""

    content: list[dict[str, Any]] | None = None


class SentUsage(Sent):
    """How many tokens were read and written, by the other server's own account."""

    model_config = ConfigDict(frozen=True, extra="allow")

    prompt_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    completion_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None

    @property
    def reasoned(self) -> bool:
        """Whether some of the tokens were reasoning."""
        return tells_reasoning(dict(self))


class SentChoice(Sent):
    """One answer."""

    message: SentMessage
    finish_reason: StrictStr | None = None
    logprobs: SentLogprobs | None = None


class SentCompletion(Sent):
    """A whole completion."""

    choices: list[SentChoice]
    usage: SentUsage | None = None


class SentDelta(Sent):
    """A piece of one answer."""

    index: StrictInt = 0
    delta: SentMessage | None = None
    finish_reason: StrictStr | None = None
    logprobs: SentLogprobs | None = None


class SentChunk(Sent):
    """A chunk of a stream; the last one may hold no answer, and the tokens that were used."""

    choices: list[SentDelta] | None = None
    usage: SentUsage | None = None
