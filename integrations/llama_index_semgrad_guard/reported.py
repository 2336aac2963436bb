"""Answers of LLMs whose servers report log-probabilities (`OpenAILike(logprobs=True, top_logprobs=5)`).

LlamaIndex tells every answer of an LLM in events, and `raw` of a response is what the server sent, log-probabilities
included. They are read from there: LlamaIndex's own list of them leaves out which token was written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, ToolCallBlock
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index_instrumentation.base.event import BaseEvent
from pydantic import BaseModel

from llama_index_semgrad_guard.records import text_of, to_conversation
from semgrad_guard import Message, Verdict
from semgrad_guard.adapters.served_calls import UNREAD_CALLS, served_options
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ReportedScorer, ReportedSentences, SentencePiece, Terms, prompt_of
from semgrad_guard.records import PromptForm


def reports(llm: Any) -> bool:
    """Whether an LLM has its server report the log-probabilities of its answers."""
    return isinstance(llm, LLM) and bool(getattr(llm, "logprobs", None) or _more(llm).get("logprobs"))


class ReportedAnswer:
    """One answer of such an LLM, with the log-probabilities that came with it.

    `scorer` is that of the guard that decides, for the name of the model. `left` are the sentences so far that may
    leave, and `new` is whether the last piece has added one, or ended the answer.
    """

    def __init__(self, llm: LLM, prompt: str | Sequence[ChatMessage], call: Mapping[str, Any]) -> None:
        found: Any = llm
        self.model = str(getattr(found, "model", None) or found.metadata.model_name)
        self.options = served_options(llm, {**_more(llm), **call})
        self.form = _form(prompt)
        self.text, self.pieces = "", list[str]()
        self.scorer: Callable[[str], ReportedScorer] = ReportedScorer
        self._entries = list[Any]()
        self._cut: bool | None = False
        self._calls_tools = False
        self._structured = any(self.options.get(name) or call.get(name) for name in ("tools", "response_format"))
        self._early: ReportedSentences | None = None
        self.left, self.new = list[SentencePiece](), False

    @property
    def prompt(self) -> ReportedAnswer:
        """The place of the prompt's form, as in a `Generation`."""
        return self

    def flow(self, terms: Terms, scorer: Callable[[str], ReportedScorer]) -> None:
        """Find the sentences that these terms let through while the answer is being written."""
        if not self._structured:
            self._early = ReportedSentences.of(scorer(self.model), terms, options=self.options, prompt=self.form)

    @classmethod
    def begun(cls, llm: LLM, event: BaseEvent) -> ReportedAnswer | None:
        """The answer that begins with this event, if one does."""
        if not isinstance(event, LLMChatStartEvent | LLMCompletionStartEvent):
            return None
        prompt = event.messages if isinstance(event, LLMChatStartEvent) else event.prompt
        return cls(llm, prompt, _fields(cast("Any", event).additional_kwargs))

    def ended(self, event: BaseEvent) -> bool:
        """Read a piece, or the whole response (behind a stream its last one); whether this was the end."""
        self.new = False
        if isinstance(event, LLMChatInProgressEvent | LLMCompletionInProgressEvent):
            self._add(event.response)
        elif isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            if event.response is not None and not self.pieces:
                self._read(event.response)
            whole = "" if event.response is None else text_of(event.response)
            self.text = "".join(self.pieces) if self.pieces else whole
            return True
        return False

    def _add(self, response: ChatResponse | CompletionResponse) -> None:
        if response.delta:
            self.pieces.append(response.delta)
        known = len(self._entries)
        self._read(response)
        if self._early is not None and not self._calls_tools:
            found = self._early.add(response.delta or "", self._entries[known:])
            self.left += found
            self.new = bool(found) or self._early.is_over

    def ended_by_doubt(self) -> ReportedAnswer | None:
        """The answer as a doubtful sentence ends it; None where none does."""
        if self._early is None or not self._early.is_over:
            return None
        part = copy.copy(self)
        part.text, part.pieces, part._entries, part._cut = self._early.text, [*self.pieces], [*self._entries], False
        return part

    def verdict(self) -> Verdict:
        """The scored draft; the decision about it is not made here."""
        scorer = self.scorer(self.model)
        if self._calls_tools:
            return scorer.unscored(self.text, UNREAD_CALLS, options=self.options)
        return scorer.verdict(self.text, self._entries, options=self.options, prompt=self.form, cut=self._cut)

    def _read(self, response: ChatResponse | CompletionResponse) -> None:
        if isinstance(response, ChatResponse):
            more = response.message.additional_kwargs.get("tool_calls")
            blocks = any(isinstance(block, ToolCallBlock) for block in response.message.blocks)
            self._calls_tools = self._calls_tools or blocks or bool(more)
        choices: Any = _fields(response.raw).get("choices")
        for choice in map(_fields, cast("Sequence[Any]", choices or ())[:1]):
            if "finish_reason" in choice:
                self._cut = None if choice["finish_reason"] is None else choice["finish_reason"] == "length"
            self._entries += map(_fields, _fields(choice.get("logprobs")).get("content") or ())


def _form(prompt: str | Sequence[ChatMessage]) -> PromptForm:
    """The form of a prompt; that of an empty one, which is like no other, where it holds something else than text."""
    try:
        conversation = [Message("user", prompt)] if isinstance(prompt, str) else to_conversation(prompt)
    except InputError:
        conversation = ()
    return prompt_of(conversation) or cast("PromptForm", prompt_of([Message("user", "")]))


def _more(llm: Any) -> Mapping[str, Any]:
    """The fields that an LLM sends with every call."""
    return _fields(getattr(llm, "additional_kwargs", None))


def _fields(given: Any) -> Mapping[str, Any]:
    """The fields of an object or a mapping."""
    if isinstance(given, BaseModel):
        return given.model_dump()
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
