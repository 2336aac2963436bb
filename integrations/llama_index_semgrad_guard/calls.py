"""The model calls of one answer, and the steps that made them, taken down as they happen.

LlamaIndex's instrumentation opens a span around the methods of its components: the spans that are open when a model is
asked say who asks. A handler that listens to them keeps, for each guarded answer, a `Turn`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from inspect import BoundArguments
from typing import Any, TypeVar, cast

from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler
from pydantic import BaseModel

from semgrad_guard import Generation, Verdict
from semgrad_guard.adapters.rewriting import as_asked
from semgrad_guard.guard import current_stop, stopping
from semgrad_guard.records import PromptForm

T = TypeVar("T")
_dispatcher = get_dispatcher(__name__)
_ASKING = frozenset(
    f"{prefix}{method}" for prefix in ("", "a", "stream_", "astream_") for method in ("chat", "complete")
)
"""An LLM's methods that ask the model."""


RETRIEVING = frozenset({"retrieve", "aretrieve"})
"""A retriever's methods that find passages."""
_HOLDERS = (Response, PydanticResponse, AgentChatResponse)


class Step:
    """A method of a component while it ran, who called it, and what it returned: an object, and the content in it."""

    def __init__(self, name: str, component: Any, parent: Step | None) -> None:
        self.name, self.component, self.parent = name, component, parent
        self.result: Any = None
        self.content: Any = None

    def end(self, result: Any) -> None:
        """Note what is returned, and what it holds now: responses can be changed later. Streams are not kept alive."""
        if isinstance(result, (str, BaseModel, *_HOLDERS)):
            self.result = result
            self.content = result.response if isinstance(result, _HOLDERS) else result

    @property
    def method(self) -> str:
        """The method's name."""
        return self.name.rpartition(".")[2]

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps around this one, the outermost first, and itself."""
        return (*(self.parent.path if self.parent else ()), self)


class ModelCall:
    """One answer of a `SemGradLLM`, scored when its verdict is first read.

    `text` and `pieces` are the very objects that went to whoever asked; `step` is where that was, and `ended` how many
    steps of the turn had ended by then.
    """

    def __init__(
        self,
        generation: Generation,
        assess: Callable[[Generation], Verdict],
        *,
        text: str | None = None,
        pieces: Sequence[str] = (),
    ) -> None:
        self.generation, self._assess = generation, assess
        self.text = generation.text if text is None else text
        self.pieces = tuple(pieces)
        self.step: Step | None = None
        self.ended = 0

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps within which the model was asked, the outermost first."""
        return self.step.path if self.step else ()

    @property
    def asked_by(self) -> tuple[str, ...]:
        """Who asked, the outermost first: "RetrieverQueryEngine.query", "Refine.get_response", "SemGradLLM.predict"."""
        return tuple(step.name for step in self.path)

    def within(self, step: Step) -> bool:
        """Whether this call was made while a step ran, by it or by what it called."""
        return step in self.path

    @property
    def prompt(self) -> PromptForm:
        """What the prompt looked like."""
        return self.generation.prompt.form

    @cached_property
    def verdict(self) -> Verdict:
        """The scored draft; the decision about it is not made here."""
        return self.score()

    @_dispatcher.span
    def score(self) -> Verdict:
        """Scoring, as a span of its own in traces."""
        return self._assess(self.generation)


class Turn:
    """All that happens for one answer: the steps in the order in which they ended, and the calls in theirs.

    `question` is what the user asked, None where that is not known.
    """

    def __init__(self, question: str | None = None) -> None:
        self.question = question
        self._lock = threading.Lock()
        self._steps: dict[str, Step] = {}
        self._asked: list[Step] = []
        self._found: list[tuple[Step, list[tuple[str, str]]]] = []
        self.calls: list[ModelCall] = []
        self.ended: list[Step] = []
        self._open: list[Callable[[], None]] = []

    @contextmanager
    def open(self) -> Generator[Turn]:
        """Take down what happens in this block, and in the threads and tasks that inherit its context."""
        _listen()
        token = _turn.set(self)
        try:
            yield self
        finally:
            _turn.reset(token)

    def add(self, call: ModelCall) -> None:
        """Take a call down; safe from any thread."""
        with self._lock:
            if call.step is None:
                call.step = self._steps.get(active_span_id.get() or "")
            call.ended = len(self.ended)
            self.calls.append(call)

    def opened(self, close: Callable[[], None]) -> None:
        """A model has begun to write piece by piece; `close` stops it, and is harmless at any time."""
        with self._lock:
            self._open.append(close)

    def stop(self) -> None:
        """Stop whatever a model still writes here, whoever else may hold its stream."""
        for close in self._open:
            close()

    @property
    def others(self) -> list[Step]:
        """Where other LLMs were asked; one that only passes on to a `SemGradLLM` is none."""
        return [step for step in self._asked if not any(call.within(step) for call in self.calls)]

    def form(self, call: ModelCall, answering: Sequence[ModelCall]) -> PromptForm:
        """What a call's prompt looked like, and whether it may ask something else than the user (see `as_asked`): calls
        before it count, but for those that answer."""
        if self.question is None:
            return call.prompt
        return as_asked(call.prompt, self.question, prepared=self._prepared(call, answering))

    def _prepared(self, call: ModelCall, answering: Sequence[ModelCall]) -> bool:
        ours = any(earlier not in answering for earlier in self.calls[: self.calls.index(call)])
        return ours or any(step in self.others for step in self.ended[: call.ended])

    def passages(self) -> frozenset[tuple[str, str]]:
        """What retrievers found without asking a model: ids and hashes of their nodes, as they were when found."""
        found = [(step, known) for step, known in self._found if not self._asks(step)]
        return frozenset(one for _, known in found for one in known)

    def _asks(self, step: Step) -> bool:
        return any(call.within(step) for call in self.calls) or any(step in asked.path for asked in self._asked)

    def enter(self, name: str, component: Any, *, id_: str, parent_id: str | None) -> None:
        """A step begins."""
        with self._lock:
            self._steps[id_] = step = Step(name, component, self._steps.get(parent_id or ""))
            if isinstance(component, LLM) and step.method in _ASKING and not is_ours(component):
                self._asked.append(step)

    def leave(self, id_: str, result: Any) -> None:
        """A step ends."""
        with self._lock:
            step = self._steps.get(id_)
            if step is None:
                return
            step.end(result)
            self.ended.append(step)
            if step.method in RETRIEVING and isinstance(result, list):
                self._found.append((step, [identity(node) for node in cast("list[Any]", result)]))


def is_ours(llm: LLM) -> bool:
    """Whether an LLM takes down its own calls, with scores."""
    return hasattr(type(llm), "language_model")


def identity(node: Any) -> tuple[str, str]:
    """A retrieved passage as it is now: its id, and the hash of its text and metadata."""
    inner = getattr(node, "node", node)
    return str(getattr(inner, "node_id", "")), str(getattr(inner, "hash", ""))


_turn: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)


def current_turn() -> Turn | None:
    """Whoever takes calls down here; None where every call is scored by itself."""
    return _turn.get()


def resumed(pieces: Generator[T], turn: Turn) -> Generator[T]:
    """The pieces of a lazy stream, whose calls belong to `turn` in whatever context they are asked for."""
    return _resumed(pieces, turn, current_stop())


def _resumed(pieces: Generator[T], turn: Turn, stop: Any) -> Generator[T]:
    try:
        while True:
            with turn.open(), stopping(stop):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


def aresumed(pieces: AsyncGenerator[T], turn: Turn) -> AsyncGenerator[T]:
    """As `resumed`, for an async stream."""
    return _aresumed(pieces, turn, current_stop())


async def _aresumed(pieces: AsyncGenerator[T], turn: Turn, stop: Any) -> AsyncGenerator[T]:
    try:
        while True:
            with turn.open(), stopping(stop):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece
    finally:
        await pieces.aclose()


class _Witness(BaseSpanHandler[BaseSpan]):
    """Tells the turn that is open, if one is, of every span; keeps nothing itself."""

    def span_enter(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        turn = _turn.get()
        if turn is not None:
            turn.enter(id_[:-_SUFFIX], instance, id_=id_, parent_id=parent_id)

    def span_exit(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        turn = _turn.get()
        if turn is not None:
            turn.leave(id_, result)

    def span_drop(self, id_: str, bound_args: BoundArguments, instance: Any = None, err: Any = None, **_: Any) -> None:
        """A step that failed has no result."""

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """None is kept."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """None is kept."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """None is kept."""


_SUFFIX = len("-") + len(str(uuid.uuid4()))
_witness = _Witness()


def _listen() -> None:
    """Have the witness among the handlers that hear everything; whoever has replaced them may have lost it."""
    handlers = cast("list[Any]", get_dispatcher("root").span_handlers)  # pyright: ignore[reportUnknownMemberType]
    if not any(handler is _witness for handler in handlers):
        handlers.append(_witness)
