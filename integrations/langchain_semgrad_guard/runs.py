"""The runs around a model's call: the outermost one, its question, and the calls that came before.

LangChain tells a chat model none of this. A `Witness` among the handlers of every run notes it until the outermost run
ends, and passes nothing on. A router in a config compares the calls of one outermost run (`Traces`).
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.tracers.context import register_configure_hook

from semgrad_guard.adapters.messages import as_asked
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.records import PromptForm

_MOST = 10_000
"""Outermost runs that are remembered; the oldest goes first, as a run may never end."""
_QUESTIONS = ("question", "input", "query", "messages")
"""The names under which a chain's input holds the user's question."""


class RunHandler(BaseCallbackHandler):
    """A handler that notes when a run of any kind begins and ends."""

    def _begins(self, run: UUID, parent: UUID | None, inputs: Any) -> None:
        """A run begins; `inputs` are a chain's."""

    def _ends(self, run: UUID) -> None:
        """A run has ended, or failed."""

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A chain, a graph or a part of one begins."""
        self._begins(run_id, parent_run_id, inputs)

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A tool begins."""
        self._begins(run_id, parent_run_id, None)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A retriever begins."""
        self._begins(run_id, parent_run_id, None)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A chain has ended."""
        self._ends(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool has ended."""
        self._ends(run_id)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A retriever has ended."""
        self._ends(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A run has failed."""
        self._ends(run_id)

    on_tool_error = on_retriever_error = on_llm_error = on_chain_error


@dataclass(eq=False)
class _Outermost:
    """An outermost run: the user's question, its runs, and the answers of models within it by their runs."""

    question: str | None
    runs: set[UUID] = field(default_factory=set[UUID])
    answers: dict[UUID, list[BaseMessage | str]] = field(default_factory=dict[UUID, "list[BaseMessage | str]"])


class Witness(RunHandler):
    """Notes the calls of models, by the outermost run that they belong to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outermost: OrderedDict[UUID, _Outermost] = OrderedDict()
        self._of: dict[UUID, UUID] = {}

    @property
    def run_inline(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether an event loop calls it at once: its pool of threads may be busy for long.

        LangChain's asynchronous `on_llm_start` leaves the other handlers out where one is inline: not there.
        """
        mine = inspect.currentframe()
        caller = mine and mine.f_back  # the method, or a comprehension in it
        near = (caller, caller and caller.f_back)
        return not any(frame and frame.f_code.co_name == "on_llm_start" for frame in near)

    def __reduce__(self) -> tuple[Any, ...]:
        return _witness, ()  # there is one: the copy of a config has it, too

    def outermost(self, run: UUID | None) -> UUID | None:
        """The outermost run around a run that is under way."""
        with self._lock:
            return None if run is None else self._of.get(run)

    def form(self, form: PromptForm, run: str | None, messages: Sequence[BaseMessage]) -> PromptForm:
        """The form of a call's prompt, given the calls before it. `run` is the call's own.

        An earlier answer that is a turn of the model in `messages` has not become a question.
        """
        with self._lock:
            outermost = self._outermost.get(self._of.get(UUID(run), _UNKNOWN)) if run else None
            if outermost is None:
                return form
            earlier = [answer for id, answer in outermost.answers.items() if str(id) != run]
            question = outermost.question
        turns = [message for message in messages if isinstance(message, AIMessage)]
        prepared = any(not any(_is_turn(text, turns) for text in answer) for answer in earlier)
        return as_asked(form, question, prepared=prepared)

    def _begins(self, run: UUID, parent: UUID | None, inputs: Any) -> None:
        with self._lock:
            root = run if parent is None else self._of.get(parent, run)
            if root == run:
                self._outermost[run] = _Outermost(_question(inputs))
            self._of[run] = root
            self._outermost[root].runs.add(run)
            while len(self._outermost) > _MOST:
                self._forget(next(iter(self._outermost)))

    def _ends(self, run: UUID) -> None:
        with self._lock:
            if self._of.get(run) == run:
                self._forget(run)

    def _forget(self, root: UUID) -> None:
        for run in self._outermost.pop(root).runs:
            del self._of[run]

    def on_llm_start(
        self, serialized: Any, prompts: list[str], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A model is called."""
        self._begins(run_id, parent_run_id, None)

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A chat model is called."""
        self._begins(run_id, parent_run_id, None)

    def on_llm_end(
        self, response: LLMResult, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A model has answered. LangChain may have left out its start, so that only the parent is known."""
        answer = [
            generation.message if isinstance(generation, ChatGeneration) else generation.text
            for generations in response.generations
            for generation in generations
        ]
        with self._lock:
            root = self._of.get(run_id) or self._of.get(parent_run_id or _UNKNOWN)
            if root is not None and root != run_id and answer:
                self._outermost[root].answers[run_id] = answer
        self._ends(run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, inputs: Any = None, **kwargs: Any) -> None:
        """A chain has ended. A stream's input comes only now: the first chain of it had the outermost run's input."""
        with self._lock:
            outermost = self._outermost.get(self._of.get(run_id, _UNKNOWN))
            if outermost is not None and outermost.question is None:
                outermost.question = _question(inputs)
        self._ends(run_id)


def _witness() -> Witness:
    return WITNESS


_UNKNOWN = UUID(int=0)
WITNESS = Witness()
register_configure_hook(ContextVar[Any]("semgrad_guard_witness", default=WITNESS), inheritable=True)


def _is_turn(answer: BaseMessage | str, turns: Sequence[AIMessage]) -> bool:
    """Whether an answer is one of these turns."""
    if isinstance(answer, str):
        return any(turn.text == answer for turn in turns)
    calls = getattr(answer, "tool_calls", [])
    return any(turn.text == answer.text and turn.tool_calls == calls for turn in turns)


def _question(inputs: Any) -> str | None:
    """The user's question, as far as a chain's input shows it."""
    if isinstance(inputs, str):
        return inputs or None
    if isinstance(inputs, PromptValue):
        return _question(inputs.to_messages())
    if isinstance(inputs, BaseMessage):
        return str(inputs.text) if inputs.type == "human" else None
    if isinstance(inputs, (list, tuple)):
        messages = [item for item in cast("list[Any]", inputs) if isinstance(item, BaseMessage)]
        questions = map(_question, reversed(messages))
        return next((question for question in questions if question is not None), None)
    if isinstance(inputs, Mapping):
        questions = map(_question, map(cast("Mapping[str, Any]", inputs).get, _QUESTIONS))
        return next((question for question in questions if question is not None), None)
    return None


# The calls of one outermost run, as a router in its config hears them: which of them are answers.

Compared = tuple[str, str, tuple[Any, ...]]
"""A message as it is compared: its role, its text and its calls."""


@dataclass
class _Trace:
    """One outermost run: the messages of its calls, the answers, and whether any of the calls was guarded."""

    calls: dict[UUID, list[Compared]] = field(default_factory=dict[UUID, "list[Compared]"])
    answers: set[tuple[str, tuple[Any, ...]]] = field(default_factory=set[tuple[str, tuple[Any, ...]]])
    is_guarded: bool = False


class Traces:
    """The outermost runs that a router hears from their beginning (it is in their config). Safe for several threads."""

    def __init__(self) -> None:
        self.names: dict[UUID, str] = {}
        """The names of models' runs that are under way."""
        self._outermost: dict[UUID, _Trace] = {}
        self._of_models: dict[UUID, _Trace] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Traces], tuple[()]]:
        return Traces, ()  # a copy in another process hears other runs

    def begins(self, run: UUID) -> None:
        """An outermost run begins."""
        with self._lock:
            self._outermost[run] = _Trace()

    def ends(self, run: UUID) -> bool | None:
        """A run ends. Of an outermost one: whether a guarded call was among its calls; None if it made none."""
        with self._lock:
            self.names.pop(run, None)
            self._of_models.pop(run, None)
            trace = self._outermost.pop(run, None)
        return trace.is_guarded if trace is not None and trace.calls else None

    def model_starts(
        self,
        run: UUID,
        parent: UUID | None,
        messages: Sequence[BaseMessage],
        *,
        name: str | None,
        guarded: bool,
        alone: bool,
    ) -> None:
        """A model is called; `alone`: the router guards every call of the outermost run, so that all must be answers.

        An agent's next step shows the model its own earlier messages, and a retry repeats a call. Any other second call
        means that one of the two writes no answer.

        Raises:
            UnenforcedPolicyError: it is such a call.
        """
        with self._lock:
            if name is not None:
                self.names[run] = name
            root = WITNESS.outermost(parent)
            trace = None if root is None else self._outermost.get(root)
            if trace is None:
                return
            call, before = [_compared(message) for message in messages], list(trace.calls.values())
            follows = any(role == "ai" and (text, calls) in trace.answers for role, text, calls in call)
            self._of_models[run], trace.calls[run] = trace, call
            trace.is_guarded = trace.is_guarded or guarded
        if alone and before and call not in before and not follows:
            raise UnenforcedPolicyError(
                "this run makes several calls that have nothing to do with each other, and the router in its config "
                "would guard all of them: where one condenses a question, summarizes a history or writes a query, an "
                "abstention would be taken for that. Name the call that writes the answer: "
                'chat.with_config(tags=["answer"]) in the chain, and UncertaintyRouterCallback(..., answering="answer")'
            )

    def model_ends(self, run: UUID, response: LLMResult) -> None:
        """A model has answered."""
        with self._lock:
            trace = self._of_models.get(run)
            if trace is not None:
                made = [generation for generations in response.generations for generation in generations]
                messages = [generation.message for generation in made if isinstance(generation, ChatGeneration)]
                trace.answers.update(_compared(message)[1:] for message in messages)
        self.ends(run)


def _compared(message: BaseMessage) -> Compared:
    calls = tuple(call["id"] for call in message.tool_calls) if isinstance(message, AIMessage) else ()
    return message.type.removesuffix("MessageChunk").lower(), str(message.text), calls
