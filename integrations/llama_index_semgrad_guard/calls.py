"""The calls of models, the steps (calls of components' methods) that made them, and the streams and passages of steps.

Lazy streams are read later and elsewhere: their calls belong to the turn and to the step that began them.

A `SemGradLLM` records its own calls. Those of LLMs whose servers report log-probabilities
(`OpenAILike(logprobs=True, top_logprobs=5)`) are read from LlamaIndex's events: `raw` of a response is what the server
sent, while LlamaIndex's own list of them leaves out which token was written.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import isasyncgen, isgenerator
from typing import Any, TypeVar, cast
from weakref import WeakSet

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, ToolCallBlock
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.schema import BaseNode
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base.event import BaseEvent
from llama_index_instrumentation.span import active_span_id
from pydantic import BaseModel

from llama_index_semgrad_guard.records import fields_of, text_of, to_conversation
from semgrad_guard import Generation, Message, ToolCall, Verdict
from semgrad_guard.adapters.calls import UNREAD_CALLS, served_options
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ReportedScorer, ReportedSentences, SentencePiece, Terms, prompt_of
from semgrad_guard.records import PromptForm

T = TypeVar("T")
_Context = Callable[[], AbstractContextManager[None]]
_dispatcher = get_dispatcher(__name__)
GENERATING = frozenset(
    f"{prefix}{method}" for prefix in ("", "a", "stream_", "astream_") for method in ("chat", "complete")
)
"""An LLM's methods that run the model."""
RETRIEVING = frozenset({"retrieve", "aretrieve"})
"""A retriever's methods that find passages."""
FINDING = frozenset({"_retrieve", "_aretrieve", "_postprocess_nodes", "_apostprocess_nodes"})
"""The methods of a retriever or a postprocessor that its class has to write."""
SYNTHESIZING = frozenset(
    {
        "synthesize",
        "asynthesize",
        "get_response",
        "aget_response",
        "get_response_from_messages",
        "aget_response_from_messages",
    }
)
"""A response synthesizer's methods: within them, the model writes answers."""
_HOLDERS = (Response, PydanticResponse, AgentChatResponse)
_STREAMS = (StreamingResponse, AsyncStreamingResponse)
clock = itertools.count(1)
"""Orders the beginnings and the ends of steps and the ends of calls, in every thread."""


_NOT_COMPARED = {"embedding", "obj"}
"""Fields of a passage that its retriever may add, and the index that it refers to."""


@dataclass(frozen=True)
class Passage:
    """A retrieved passage at one time: its id, the hash of all its content, and its text."""

    id: str
    hash: str
    text: str

    @classmethod
    def of(cls, node: Any) -> Passage:
        """A node with a score, or without."""
        inner = getattr(node, "node", node)
        if not isinstance(inner, BaseNode):
            return cls("", "", "")
        content = repr(inner.model_dump(exclude=_NOT_COMPARED, warnings=False))  # relationships and templates as well
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        return cls(inner.node_id, digest, inner.get_content())


class Step:
    """A call of a component's method, the step that made it, and its result: an object, and the content in it.

    `passages` are the nodes that it was given, as they were then.
    """

    def __init__(
        self, name: str, component: Any, parent: Step | None, *, span: str = "", nodes: Sequence[Any] = ()
    ) -> None:
        self.name, self.component, self.parent, self._span = name, component, parent, span
        self.passages = tuple(Passage.of(node) for node in nodes)
        self.began, self.ended = next(clock), 0
        self.result: Any = None
        self.content: Any = None
        self.answer: ReportedAnswer | None = None
        self._stream: Callable[[], Any] = lambda: None

    def end(self, result: Any) -> None:
        """Note the result and its content now: responses can be changed later. Streams are not kept alive."""
        self.ended = next(clock)
        if isinstance(result, (str, BaseModel, *_HOLDERS)):
            self.result = result
            self.content = result.response if isinstance(result, _HOLDERS) else result
        if isinstance(result, _STREAMS):
            result.response_gen = bound_to(result.response_gen, self._span)
            if isgenerator(result.response_gen) or isasyncgen(result.response_gen):
                self._stream = weakref.ref(result.response_gen)

    @property
    def stream(self) -> Any:
        """The pieces of the stream that was returned, while they are alive; None for any other result."""
        return self._stream()

    @property
    def method(self) -> str:
        """The method's name."""
        return self.name.rpartition(".")[2]

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps around this one, the outermost first, and itself."""
        return (*(self.parent.path if self.parent else ()), self)


class ModelCall:
    """One answer of a `SemGradLLM`, or by its log-probabilities of another LLM, scored when its verdict is first read.

    `text` and `pieces` are the very objects that went to the caller, `step` is the step that made the call, and `ended`
    its place in time. The text of a `withheld` call was kept back by a guard within the engine.
    """

    def __init__(
        self,
        generation: Generation | ReportedAnswer,
        assess: Callable[[Any], Verdict],
        *,
        text: str | None = None,
        pieces: Sequence[str] = (),
        tool_calls: Sequence[ToolCall] = (),
    ) -> None:
        self.generation, self._assess = generation, assess
        self.tool_calls = tuple(tool_calls)
        self.text = generation.text if text is None else text
        self.pieces = tuple(pieces)
        self.step: Step | None = None
        self.ended = 0
        self.withheld = False

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps within which the model ran, the outermost first."""
        return self.step.path if self.step else ()

    @property
    def written(self) -> tuple[str | Mapping[str, Any], ...]:
        """The text, and the arguments of the calls of tools."""
        return (self.text, *(call.arguments for call in self.tool_calls))

    def within(self, step: Step) -> bool:
        """Whether a step made this call, by itself or by the steps within it."""
        return step in self.path

    @property
    def prompt(self) -> PromptForm:
        """The form of the prompt."""
        return self.generation.prompt.form

    @cached_property
    def verdict(self) -> Verdict:
        """The scored draft; the decision about it is not made here."""
        verdicts = list[Verdict]()
        self.score(verdicts.append)
        return verdicts[0]

    @_dispatcher.span
    def score(self, hand_over: Callable[[Verdict], None]) -> float | None:
        """Score, as a span of its own in traces, which record the result: it must not hold the text."""
        verdict = self._assess(self.generation)
        hand_over(verdict)
        return verdict.uncertainty


class Leaving:
    """The sentences of a turn that leave while its model is still writing, with the call that wrote them.

    The terms reach the model within the engine's turn. The model hands the whole draft to the engine, and the sentences
    that are let through to the turn. These leave as soon as the engine has passed the draft on so far, as the answer of
    this one call (`GuardedPieces`).

    `scorer` is that of a model whose server reports log-probabilities, by its name.
    """

    def __init__(self, terms: Terms, scorer: Callable[[str], ReportedScorer]) -> None:
        self.terms, self.scorer = terms, scorer
        self._let_through = list[tuple[ModelCall, tuple[SentencePiece, ...], ModelCall | None]]()
        self._left = 0

    def add(self, call: ModelCall, sentences: Sequence[SentencePiece], ended: ModelCall | None = None) -> None:
        """Note the sentences of a call so far; `ended` is the call where a doubtful sentence ends it here."""
        self._let_through.append((call, tuple(sentences), ended))

    def next(self, is_the_answer: Callable[[ModelCall], bool]) -> tuple[Sequence[SentencePiece], ModelCall | None]:
        """The new sentences of the call that is the answer so far, and this call where a doubtful sentence ends it."""
        for call, sentences, ended in reversed(self._let_through):
            if is_the_answer(call):
                new, self._left = sentences[self._left :], max(self._left, len(sentences))
                return new, ended
        return (), None


def is_ours(llm: LLM) -> bool:
    """Whether an LLM records its own calls, with scores."""
    return hasattr(type(llm), "language_model")


def runs_another(step: Step) -> bool:
    """Whether a step runs an LLM that records nothing. LlamaIndex's `StructuredLLM` only runs the one in it."""
    llm = step.component
    while type(llm) is StructuredLLM:
        llm = llm.llm
    return isinstance(llm, LLM) and step.method in GENERATING and not is_ours(llm)


# Lazy streams.

_bound = WeakSet[Any]()
"""The streams that know their step."""


def begun_here(pieces: Generator[T]) -> Generator[T]:
    """The pieces of a lazy stream, whose call belongs to the current step, in whatever context they are read."""
    return _read_in(pieces, partial(_within, active_span_id.get()))


def abegun_here(pieces: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """As `begun_here`, for an async stream."""
    return _aread_in(pieces, partial(_within, active_span_id.get()))


def bound_to(pieces: Any, span: str) -> Any:
    """A stream whose calls belong to the step that returned it: engines run their model when it is first read."""
    if pieces in _bound:
        return pieces
    if isgenerator(pieces):
        bound: Any = _read_in(cast("Generator[Any]", pieces), partial(_within, span))
    elif isasyncgen(pieces):
        bound = _aread_in(cast("AsyncGenerator[Any]", pieces), partial(_within, span))
    else:
        return pieces
    _bound.add(bound)
    return bound


def _read_in(pieces: Generator[T], context: _Context) -> Generator[T]:
    """The pieces, every one of which is read in a context of its own that has ended when it goes out."""
    try:
        while True:
            with context():
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


async def _aread_in(pieces: AsyncGenerator[T], context: _Context) -> AsyncGenerator[T]:
    try:
        while True:
            with context():
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


@contextmanager
def _within(span: str | None) -> Generator[None]:
    token = active_span_id.set(span)
    try:
        yield
    finally:
        active_span_id.reset(token)


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
        self._is_part = False
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
        return cls(llm, prompt, fields_of(cast("Any", event).additional_kwargs))

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
        part._is_part = True
        return part

    def verdict(self) -> Verdict:
        """The scored draft; the decision about it is not made here."""
        scorer = self.scorer(self.model)
        if self._calls_tools:
            return scorer.unscored(self.text, UNREAD_CALLS, options=self.options)
        facts: dict[str, Any] = {"options": self.options, "prompt": self.form}
        return scorer.verdict(self.text, self._entries, cut=self._cut, is_part=self._is_part, **facts)

    def _read(self, response: ChatResponse | CompletionResponse) -> None:
        if isinstance(response, ChatResponse):
            more = response.message.additional_kwargs.get("tool_calls")
            blocks = any(isinstance(block, ToolCallBlock) for block in response.message.blocks)
            self._calls_tools = self._calls_tools or blocks or bool(more)
        choices: Any = fields_of(response.raw).get("choices")
        for choice in map(fields_of, cast("Sequence[Any]", choices or ())[:1]):
            if "finish_reason" in choice:
                self._cut = None if choice["finish_reason"] is None else choice["finish_reason"] == "length"
            self._entries += map(fields_of, fields_of(choice.get("logprobs")).get("content") or ())


def _form(prompt: str | Sequence[ChatMessage]) -> PromptForm:
    """The form of a prompt; that of an empty one, which is like no other, where it holds something else than text."""
    try:
        conversation = [Message("user", prompt)] if isinstance(prompt, str) else to_conversation(prompt)
    except InputError:
        conversation = ()
    return prompt_of(conversation) or cast("PromptForm", prompt_of([Message("user", "")]))


def _more(llm: Any) -> Mapping[str, Any]:
    """The fields that an LLM sends with every call."""
    return fields_of(getattr(llm, "additional_kwargs", None))
