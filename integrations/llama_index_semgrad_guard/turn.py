"""The model calls of one answer, and the steps that made them, recorded as they happen.

LlamaIndex's instrumentation opens a span around the methods of its components: the spans that are open when a model
runs tell which component runs it. A span handler keeps a `Turn` for each guarded answer.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any, cast

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.instrumentation.events.chat_engine import StreamChatDeltaReceivedEvent
from llama_index.core.llms.llm import LLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base.event import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.span import BaseSpan, active_span_id
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from llama_index_semgrad_guard.calls import (
    FINDING,
    GENERATING,
    RETRIEVING,
    SYNTHESIZING,
    Leaving,
    ModelCall,
    Passage,
    ReportedAnswer,
    Step,
    clock,
    reports,
    runs_another,
)
from llama_index_semgrad_guard.records import FEW, repeats, shares, text_of, words_of
from semgrad_guard.adapters.calls import as_asked
from semgrad_guard.guard import ReportedScorer, SentencePiece
from semgrad_guard.records import PromptForm


class Turn:
    """All that happens for one answer: the steps and the calls, both in the order in which they ended.

    `question` is the user's, None where that is not known. A turn that begins within another one (a guard within a
    guarded engine) is part of it: the outer turn records every step and call as well. `others` are the steps in which
    other LLMs ran; one that runs a `SemGradLLM` is another one, as its text may be different.
    """

    def __init__(self, question: str | None = None) -> None:
        self.question = question
        self._outer = _turn.get()
        self._root: Turn = self if self._outer is None else self._outer._root
        self._lock = threading.Lock()
        self._steps: dict[str, Step] = {}
        self._retrieved: list[tuple[Step, list[Passage]]] = []
        self.others: list[Step] = []
        self.calls: list[ModelCall] = []
        self.ended: list[Step] = []
        self.strays: list[Stray] = []
        self.neighbours: list[ModelCall] = []
        self._open: list[Callable[[], None]] = []
        self.is_stopped = False
        self.leaving: Leaving | None = None

    @contextmanager
    def open(self) -> Generator[Turn]:
        """Record all that happens in this block, and in the threads and tasks that inherit its context."""
        handlers = cast("list[Any]", get_dispatcher("root").span_handlers)  # pyright: ignore[reportUnknownMemberType]
        if not any(handler is _witness for handler in handlers):  # they may have been replaced since
            handlers.append(_witness)
        listeners = cast("list[Any]", get_dispatcher("root").event_handlers)  # pyright: ignore[reportUnknownMemberType]
        if not any(listener is _listener for listener in listeners):
            listeners.append(_listener)
        token = _turn.set(self)
        _open_turns.append(self)
        try:
            yield self
        finally:
            _open_turns.remove(self)
            _turn.reset(token)

    def add(self, call: ModelCall) -> None:
        """Record a call; safe from any thread."""
        with self._lock:
            self.place(call)
            self.calls.append(call)
        if self._outer is not None:
            self._outer.add(call)

    def place(self, call: ModelCall) -> None:
        """Note the step in progress as the call's, and its place in time."""
        if call.step is None:
            call.step = self._steps.get(active_span_id.get() or "")
        call.ended = call.ended or next(clock)

    def let_through(
        self,
        answer: Any,
        pieces: Sequence[str],
        sentences: Sequence[SentencePiece],
        *,
        ended: ModelCall | None = None,
    ) -> None:
        """Note the sentences so far that may leave, of a call that writes these pieces; `ended` as in `Leaving.add`."""
        if self.leaving is not None:
            call = ModelCall(answer, cast("Any", None), text="".join(pieces), pieces=pieces)
            self.place(call)
            self.leaving.add(call, sentences, ended)

    def end_with(self, call: ModelCall) -> None:
        """Record a call, which a doubtful sentence ended, in the place of all that its model writes after it."""
        with self._lock:
            self.calls = [other for other in self.calls if other.step is not call.step]
        if call.step is not None:
            call.step.answer = None
        self.add(call)

    def scored(self, calls: Sequence[ModelCall]) -> None:
        """Share calls with turns that are open elsewhere: only now, as a call without a score holds much memory."""
        for turn in tuple(_open_turns):
            if turn._root is not self._root:
                turn.neighbours.extend(calls)

    def opened(self, close: Callable[[], None]) -> None:
        """A model has begun to stream; `close` stops it, and is harmless at any time."""
        with self._lock:
            self._open.append(close)
        if self.is_stopped:
            close()
        if self._outer is not None:
            self._outer.opened(close)

    def stop(self) -> None:
        """Stop all streams of models here, in any thread; they end without an error, as nobody reads them."""
        self.is_stopped = True
        for close in self._open:
            close()

    @property
    def synthesizes(self) -> bool:
        """Whether the step in progress belongs to a response synthesizer, whose calls write the answer."""
        step = self._steps.get(active_span_id.get() or "")
        return step is not None and any(around.method in SYNTHESIZING for around in step.path)

    @property
    def has_begun(self) -> bool:
        """Whether a model may have generated text, for this turn or for an unknown one."""
        ran = any(isinstance(step.component, LLM) and step.method in GENERATING for step in self._steps.values())
        return ran or bool(self.calls or self.strays or self.neighbours)

    def withhold(self) -> None:
        """A guard keeps back the texts of all calls so far: nothing of them can be in later texts."""
        for call in self.calls:
            call.withheld = True

    @property
    def outsiders(self) -> list[Step]:
        """The steps in which other LLMs ran without running a `SemGradLLM` in their turn."""
        return [step for step in self.others if not any(call.within(step) for call in self.calls)]

    def form(self, call: ModelCall, answering: Sequence[ModelCall]) -> PromptForm:
        """The form of a call's prompt, and whether it may differ from the user's question (see `as_asked`): calls
        before it count, except those that answer."""
        if self.question is None:
            return call.prompt
        ours = any(earlier not in answering for earlier in self.calls if earlier.ended < call.ended)
        prepared = ours or any(step.ended and step.ended < call.ended for step in self.others)
        return as_asked(call.prompt, self.question, prepared=prepared)

    def passages(self) -> frozenset[tuple[str, str]]:
        """The passages that retrievers found without a model: ids and hashes of their nodes at that time.

        Without those that repeat words which a guard in another thread let out while passages were retrieved.
        """
        retrieving = self._retrieving()
        overlapping = [call for call in self.neighbours if any(begin < call.ended < end for begin, end in retrieving)]
        return frozenset(
            (passage.id, passage.hash)
            for step, passages in self._retrieved
            if not self._runs_a_model(step, self.calls)
            for passage in passages
            if not self.strays_in(passage) and not any(repeats(passage.text, call.text) for call in overlapping)
        )

    def _retrieving(self) -> list[tuple[int, int]]:
        """When passages were retrieved."""
        return [(step.began, step.ended) for step in self.ended if step.method in RETRIEVING | FINDING]

    def overheard(self, text: str) -> list[ModelCall]:
        """The calls of unknown turns whose words a prompt repeats.

        These are strays, and calls of a guard that ran in a thread without its caller's context. That guard has a turn
        of its own, as another user's has: four words and more must be the same.
        """
        shown, others = words_of(text), [call for call in self.neighbours if not call.withheld]
        mine = [stray.call for stray in self.strays if stray.call and shares(shown, words_of(stray.text), words=1)]
        return [*mine, *(call for call in others if shares(shown, words_of(call.text)))]

    def strays_in(self, passage: Passage) -> list[Stray]:
        """The strays whose words a passage repeats: any words of those that came while passages were retrieved."""
        retrieving = self._retrieving()

        def fewest(stray: Stray) -> int:
            return 1 if any(begin < stray.at < end for begin, end in retrieving) else FEW

        return [stray for stray in self.strays if repeats(passage.text, stray.text, words=fewest(stray))]

    def speaks(self, step: Step) -> bool:
        """Whether a model ran within a step, and a guard there did not keep back all of its words."""
        return self._runs_a_model(step, [call for call in self.calls if not call.withheld])

    def _runs_a_model(self, step: Step, calls: Sequence[ModelCall]) -> bool:
        return any(call.within(step) for call in calls) or any(step in other.path for other in self.others)

    def enter(self, name: str, component: Any, *, id_: str, parent_id: str | None, nodes: Sequence[Any] = ()) -> Step:
        """A step begins."""
        outer = self._outer
        step = None if outer is None else outer.enter(name, component, id_=id_, parent_id=parent_id, nodes=nodes)
        with self._lock:
            if step is None:
                step = Step(name, component, self._steps.get(parent_id or ""), span=id_, nodes=nodes)
            self._steps[id_] = step
            if runs_another(step):
                self.others.append(step)
        return step

    def note(self, event: BaseEvent) -> None:
        """An answer of an LLM that reports log-probabilities: its begin, its pieces, and its end, which is a call."""
        step = self._steps.get(event.span_id or "")
        if self.is_stopped and isinstance(event, StreamChatDeltaReceivedEvent) and step is not None:
            step.component.chat_stream.close()  # here, in the thread that reads it, and between two of its pieces
        if step is None or not reports(step.component):
            return
        if (begun := ReportedAnswer.begun(step.component, event)) is not None:
            step.answer = begun
            if self.leaving is not None:
                begun.flow(self.leaving.terms, self.leaving.scorer)
            self._is_recorded(step)
        elif (answer := step.answer) is not None and answer.ended(event):
            step.answer = None
            self.add(_reported_call(answer, step))
        elif answer is not None and answer.new:
            ended = None if (part := answer.ended_by_doubt()) is None else _reported_call(part, step)
            self.let_through(answer, answer.pieces, answer.left, ended=ended)

    def _is_recorded(self, step: Step) -> None:
        """A step runs an LLM that is no other one: its answer will be a call."""
        self.others = [other for other in self.others if other is not step]
        if self._outer is not None:
            self._outer._is_recorded(step)

    def score_by(self, scorer: Callable[[str], ReportedScorer]) -> None:
        """How a guard scores the answers that have log-probabilities."""
        for call in self.calls:
            if isinstance(call.generation, ReportedAnswer):
                call.generation.scorer = scorer

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
                self._retrieved.append((step, [Passage.of(node) for node in cast("list[Any]", result)]))


def _reported_call(answer: ReportedAnswer, step: Step) -> ModelCall:
    call = ModelCall(answer, ReportedAnswer.verdict, text=answer.text, pieces=answer.pieces)
    call.step = step
    return call


@dataclass(frozen=True)
class Stray:
    """A model's text for an unknown turn: from a thread that did not inherit its caller's context.

    `call` is None where it is another LLM's.
    """

    text: str
    call: ModelCall | None
    at: int


def stray(text: str, call: ModelCall | None = None) -> None:
    """Add a text to all turns that are open, in whatever thread: its words may be in them."""
    added = Stray(text, call, next(clock))
    if call is not None:
        call.ended = added.at
    for turn in tuple(_open_turns):
        turn.strays.append(added)


_open_turns: list[Turn] = []
"""Those whose block is running now, in any thread."""
_turn: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)


def current_turn() -> Turn | None:
    """The turn that records calls here; None where every call is scored by itself."""
    return _turn.get()


class _Witness(BaseSpanHandler[BaseSpan]):
    """Passes every span on to the turn that is open, if one is."""

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
        elif isinstance(result, (ChatResponse, CompletionResponse)) and runs_another(
            Step(id_[:-_SUFFIX], instance, None)
        ):
            stray(text_of(result))

    def span_drop(self, id_: str, bound_args: BoundArguments, instance: Any = None, err: Any = None, **_: Any) -> None:
        """Do nothing: a step that failed has no result."""

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no span."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no span."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no span."""


_SUFFIX = len("-") + len(str(uuid.uuid4()))
_witness = _Witness()


class _Listener(BaseEventHandler):
    """Passes the events of LLMs on to the turn that is open, if one is."""

    @classmethod
    def class_name(cls) -> str:
        return "semgrad_guard"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        turn = _turn.get()
        if turn is not None:
            turn.note(event)


_listener = _Listener()
