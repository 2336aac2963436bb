"""The model calls of one answer, and the steps that made them, taken down as they happen.

LlamaIndex's instrumentation opens a span around the methods of its components: the spans that are open when a model is
asked say who asks. A handler that listens to them keeps, for each guarded answer, a `Turn`.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from inspect import BoundArguments, isasyncgen, isgenerator
from typing import Any, cast

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler
from pydantic import BaseModel

from llama_index_semgrad_guard.lazy_streams import bound_to
from llama_index_semgrad_guard.records import text_of
from llama_index_semgrad_guard.wording import repeats, shares, words_of
from semgrad_guard import Generation, Verdict
from semgrad_guard.adapters.rewriting import as_asked
from semgrad_guard.records import PromptForm

_dispatcher = get_dispatcher(__name__)
_ASKING = frozenset(
    f"{prefix}{method}" for prefix in ("", "a", "stream_", "astream_") for method in ("chat", "complete")
)
"""An LLM's methods that ask the model."""


RETRIEVING = frozenset({"retrieve", "aretrieve"})
"""A retriever's methods that find passages."""
FINDING = frozenset({"_retrieve", "_aretrieve", "_postprocess_nodes", "_apostprocess_nodes"})
"""The methods of a retriever or a postprocessor that its class has to write."""
_NOT_COMPARED = {"embedding", "obj"}
"""Of a passage: what its retriever may add, and an index that it stands for."""
_HOLDERS = (Response, PydanticResponse, AgentChatResponse)
_STREAMS = (StreamingResponse, AsyncStreamingResponse)
_clock = itertools.count(1)
"""Orders the beginnings and the ends of steps and the ends of calls, in every thread."""


class Step:
    """A method of a component while it ran, who called it, and what it returned: an object, and the content in it.

    `passages` are the nodes that it was given, as they were then.
    """

    def __init__(
        self, name: str, component: Any, parent: Step | None, *, span: str = "", nodes: Sequence[Any] = ()
    ) -> None:
        self.name, self.component, self.parent, self._span = name, component, parent, span
        self.passages = tuple(Passage.of(node) for node in nodes)
        self.began, self.ended = next(_clock), 0
        self.result: Any = None
        self.content: Any = None
        self._stream: Callable[[], Any] = lambda: None

    def end(self, result: Any) -> None:
        """Note what is returned, and what it holds now: responses can be changed later. Streams are not kept alive."""
        self.ended = next(_clock)
        if isinstance(result, (str, BaseModel, *_HOLDERS)):
            self.result = result
            self.content = result.response if isinstance(result, _HOLDERS) else result
        if isinstance(result, _STREAMS):
            result.response_gen = bound_to(result.response_gen, self._span)
            if isgenerator(result.response_gen) or isasyncgen(result.response_gen):
                self._stream = weakref.ref(result.response_gen)

    @property
    def stream(self) -> Any:
        """The pieces of the stream that was returned, while somebody holds them; None if it was none."""
        return self._stream()

    @property
    def method(self) -> str:
        """The method's name."""
        return self.name.rpartition(".")[2]

    @property
    def path(self) -> tuple[Step, ...]:
        """The steps around this one, the outermost first, and itself."""
        return (*(self.parent.path if self.parent else ()), self)


@dataclass(frozen=True)
class Passage:
    """A retrieved passage as it was at one time: its id, the hash of all that it holds, and its text."""

    id: str
    hash: str
    text: str

    @classmethod
    def of(cls, node: Any) -> Passage:
        """A node with a score, or without."""
        inner = getattr(node, "node", node)
        if not isinstance(inner, BaseNode):
            return cls("", "", "")
        held = inner.model_dump(exclude=_NOT_COMPARED, warnings=False)  # relationships, templates and the like as well
        return cls(
            inner.node_id, hashlib.sha256(repr(held).encode("utf-8", "surrogatepass")).hexdigest(), inner.get_content()
        )


class ModelCall:
    """One answer of a `SemGradLLM`, scored when its verdict is first read.

    `text` and `pieces` are the very objects that went to the caller, `step` is the step that made the call, and `ended`
    its place in time. The text of a `withheld` call was kept back by a guard within the engine.
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
        self.withheld = False

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
        found = list[Verdict]()
        self.score(found.append)
        return found[0]

    @_dispatcher.span
    def score(self, hand_over: Callable[[Verdict], None]) -> float | None:
        """Scoring, as a span of its own in traces: these write down the result, so that it must not hold the text."""
        verdict = self._assess(self.generation)
        hand_over(verdict)
        return verdict.uncertainty


class Turn:
    """All that happens for one answer: the steps in the order in which they ended, and the calls in theirs.

    `question` is the user's, None where that is not known. A turn that begins within another one (a guard within a
    guarded engine) is part of it: the outer turn hears of every step and call.
    """

    def __init__(self, question: str | None = None) -> None:
        self.question = question
        self._outer = _turn.get()
        self._root: Turn = self if self._outer is None else self._outer._root
        self._lock = threading.Lock()
        self._steps: dict[str, Step] = {}
        self._asked: list[Step] = []
        self._found: list[tuple[Step, list[Passage]]] = []
        self.calls: list[ModelCall] = []
        self.ended: list[Step] = []
        self.strays: list[Stray] = []
        self.neighbours: list[ModelCall] = []
        self._open: list[Callable[[], None]] = []

    @contextmanager
    def open(self) -> Generator[Turn]:
        """Take down what happens in this block, and in the threads and tasks that inherit its context."""
        _listen()
        token = _turn.set(self)
        _open_turns.append(self)
        try:
            yield self
        finally:
            _open_turns.remove(self)
            _turn.reset(token)

    def add(self, call: ModelCall) -> None:
        """Take a call down; safe from any thread."""
        with self._lock:
            if call.step is None:
                call.step = self._steps.get(active_span_id.get() or "")
            call.ended = call.ended or next(_clock)
            self.calls.append(call)
        if self._outer is not None:
            self._outer.add(call)

    def scored(self, calls: Sequence[ModelCall]) -> None:
        """Tell turns that are open elsewhere; not before, since a call without a score holds much memory."""
        for turn in tuple(_open_turns):
            if turn._root is not self._root:
                turn.neighbours.extend(calls)

    def opened(self, close: Callable[[], None]) -> None:
        """A model has begun to write piece by piece; `close` stops it, and is harmless at any time."""
        with self._lock:
            self._open.append(close)
        if self._outer is not None:
            self._outer.opened(close)

    def stop(self) -> None:
        """Stop whatever a model still writes here, in any thread."""
        for close in self._open:
            close()

    @property
    def has_begun(self) -> bool:
        """Whether a model may have said something, here or where nobody knows for whom."""
        asked = any(isinstance(step.component, LLM) and step.method in _ASKING for step in self._steps.values())
        return asked or bool(self.calls or self.strays or self.neighbours)

    def withhold(self) -> None:
        """A guard keeps back all that its calls have said so far: nothing of it can be in what comes later."""
        for call in self.calls:
            call.withheld = True

    @property
    def others(self) -> list[Step]:
        """Where other LLMs were asked. One that asks a `SemGradLLM` is another one: it may say something else."""
        return self._asked

    @property
    def outsiders(self) -> list[Step]:
        """Where other LLMs were asked that did not ask a `SemGradLLM` in their turn."""
        return [step for step in self._asked if not any(call.within(step) for call in self.calls)]

    def form(self, call: ModelCall, answering: Sequence[ModelCall]) -> PromptForm:
        """What a call's prompt looked like, and whether it may ask something else than the user (see `as_asked`): calls
        before it count, but for those that answer."""
        if self.question is None:
            return call.prompt
        return as_asked(call.prompt, self.question, prepared=self._prepared(call, answering))

    def _prepared(self, call: ModelCall, answering: Sequence[ModelCall]) -> bool:
        ours = any(earlier not in answering for earlier in self.calls if earlier.ended < call.ended)
        return ours or any(step.ended and step.ended < call.ended for step in self.others)

    def passages(self) -> frozenset[tuple[str, str]]:
        """What retrievers found without asking a model: ids and hashes of their nodes, as they were when found."""
        found = [passage for step, known in self._found if not self._asks(step) for passage in known]
        return frozenset(
            (each.id, each.hash) for each in found if not self.strays_in(each) and not self._is_a_neighbours(each)
        )

    def _is_a_neighbours(self, passage: Passage) -> bool:
        """Whether a passage repeats words that a guard in another thread let out while passages were looked for."""
        looking = self._looking()
        said = [call for call in self.neighbours if any(begin < call.ended < end for begin, end in looking)]
        return any(repeats(passage.text, call.text) for call in said)

    def _looking(self) -> list[tuple[int, int]]:
        """When passages were looked for."""
        return [(step.began, step.ended) for step in self.ended if step.method in RETRIEVING | FINDING]

    def overheard(self, text: str) -> list[ModelCall]:
        """The calls whose words a prompt repeats, though nobody knows that they were made for it.

        Beside the strays it may be the call of a guard that was asked in a thread without its caller's context: that
        one has a turn of its own, as another user's has, so that four words and more must be the same.
        """
        shown, others = words_of(text), [call for call in self.neighbours if not call.withheld]
        mine = [stray.call for stray in self.strays if stray.call and shares(shown, words_of(stray.text), words=1)]
        return [*mine, *(call for call in others if shares(shown, words_of(call.text)))]

    def strays_in(self, passage: Passage) -> list[Stray]:
        """The strays whose words a passage repeats: any words of those that came while passages were looked for."""
        looking = self._looking()
        return [
            stray
            for stray in self.strays
            if repeats(
                passage.text, stray.text, words=1 if any(begin < stray.at < end for begin, end in looking) else 4
            )
        ]

    def speaks(self, step: Step) -> bool:
        """Whether a model was asked within a step, and not all of its words were kept back by a guard there."""
        return self._asks(step, [call for call in self.calls if not call.withheld])

    def _asks(self, step: Step, calls: Sequence[ModelCall] | None = None) -> bool:
        ours = any(call.within(step) for call in (self.calls if calls is None else calls))
        return ours or any(step in asked.path for asked in self._asked)

    def enter(self, name: str, component: Any, *, id_: str, parent_id: str | None, nodes: Sequence[Any] = ()) -> Step:
        """A step begins."""
        outer = self._outer
        step = None if outer is None else outer.enter(name, component, id_=id_, parent_id=parent_id, nodes=nodes)
        with self._lock:
            if step is None:
                step = Step(name, component, self._steps.get(parent_id or ""), span=id_, nodes=nodes)
            self._steps[id_] = step
            if _asks_another(step):
                self._asked.append(step)
        return step

    def leave(self, id_: str, result: Any) -> None:
        """A step ends."""
        if self._outer is not None:
            self._outer.leave(id_, result)
        with self._lock:
            step = self._steps.get(id_)
            if step is None:
                return
            if not step.ended:
                step.end(result)
            self.ended.append(step)
            if step.method in RETRIEVING and isinstance(result, list):
                self._found.append((step, [Passage.of(node) for node in cast("list[Any]", result)]))


@dataclass(frozen=True)
class Stray:
    """What a model said where nobody knows for whom: in a thread that did not inherit its caller's context.

    `call` is None where another LLM said it.
    """

    text: str
    call: ModelCall | None
    at: int


def stray(text: str, call: ModelCall | None = None) -> None:
    """Tell all turns that are open, in whatever thread, of words that may be in them."""
    found = Stray(text, call, next(_clock))
    if call is not None:
        call.ended = found.at
    for turn in tuple(_open_turns):
        turn.strays.append(found)


def is_ours(llm: LLM) -> bool:
    """Whether an LLM takes down its own calls, with scores."""
    return hasattr(type(llm), "language_model")


def _asks_another(step: Step) -> bool:
    """Whether a step asks an LLM that takes nothing down. LlamaIndex's `StructuredLLM` only asks the one in it."""
    llm = step.component
    while type(llm) is StructuredLLM:
        llm = llm.llm
    return isinstance(llm, LLM) and step.method in _ASKING and not is_ours(llm)


_open_turns: list[Turn] = []
"""Those in whose block something runs now, in any thread."""
_turn: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)


def current_turn() -> Turn | None:
    """Whoever takes calls down here; None where every call is scored by itself."""
    return _turn.get()


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
            nodes = bound_args.arguments.get("nodes") if isinstance(instance, BaseSynthesizer) else None
            turn.enter(id_[:-_SUFFIX], instance, id_=id_, parent_id=parent_id, nodes=nodes or ())

    def span_exit(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        turn = _turn.get()
        if turn is not None:
            turn.leave(id_, result)
        elif isinstance(result, (ChatResponse, CompletionResponse)) and _asks_another(
            Step(id_[:-_SUFFIX], instance, None)
        ):
            stray(text_of(result))

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
