"""The calls of models, and the steps (calls of components' methods) that made them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import isasyncgen, isgenerator
from typing import Any

from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from llama_index_semgrad_guard.lazy_streams import bound_to
from llama_index_semgrad_guard.passages import Passage
from llama_index_semgrad_guard.reported import ReportedAnswer
from semgrad_guard import Generation, ToolCall, Verdict
from semgrad_guard.records import PromptForm

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

    @property
    def asked_by(self) -> tuple[str, ...]:
        """The names of these steps: "RetrieverQueryEngine.query", "Refine.get_response", "SemGradLLM.predict"."""
        return tuple(step.name for step in self.path)

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


def is_ours(llm: LLM) -> bool:
    """Whether an LLM records its own calls, with scores."""
    return hasattr(type(llm), "language_model")


def runs_another(step: Step) -> bool:
    """Whether a step runs an LLM that records nothing. LlamaIndex's `StructuredLLM` only runs the one in it."""
    llm = step.component
    while type(llm) is StructuredLLM:
        llm = llm.llm
    return isinstance(llm, LLM) and step.method in GENERATING and not is_ours(llm)
