"""What happened before a model's call in the same run: what the user asked, and which models have answered since.

LangChain tells a chat model neither. A witness among the handlers of every run notes it, for as long as the outermost
run lasts; it keeps texts of that time and says nothing to anybody.
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

from semgrad_guard.adapters.rewriting import as_asked
from semgrad_guard.records import PromptForm

_MOST = 10_000
"""Outermost runs that are remembered; one that never ends is forgotten at last."""
_QUESTIONS = ("question", "input", "query", "messages")
"""Under which names inputs hold what the user asks."""


@dataclass(eq=False)
class _Whole:
    """An outermost run: what it was given to answer, its runs, and the answers of models within it, by their runs."""

    question: str | None
    runs: set[UUID] = field(default_factory=set[UUID])
    answers: dict[UUID, list[BaseMessage | str]] = field(default_factory=dict[UUID, "list[BaseMessage | str]"])


class Witness(BaseCallbackHandler):
    """Notes the calls of models, by the outermost run that they belong to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wholes: OrderedDict[UUID, _Whole] = OrderedDict()
        self._of: dict[UUID, UUID] = {}

    @property
    def run_inline(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether an event loop calls it at once, and not in a thread of its pool, which may be busy for long.

        Where one handler is inline, LangChain's asynchronous `on_llm_start` tells it to no other: there this is none.
        """
        mine = inspect.currentframe()
        caller = mine and mine.f_back  # the method, or a comprehension in it
        near = (caller, caller and caller.f_back)
        return not any(frame and frame.f_code.co_name == "on_llm_start" for frame in near)

    def __reduce__(self) -> tuple[Any, ...]:
        return _witness, ()  # there is one: a copy of a config has it, too

    def form(self, form: PromptForm, run: str | None, messages: Sequence[BaseMessage]) -> PromptForm:
        """What the prompt of a call looks like, given what came before it. `run` is the call's own.

        An earlier answer that stands among the messages as the model's own turn has not become a question.
        """
        with self._lock:
            whole = self._wholes.get(self._of.get(UUID(run), _NOBODY)) if run else None
            earlier = [] if whole is None else [each for id, each in whole.answers.items() if str(id) != run]
            question = None if whole is None else whole.question
        if whole is None:
            return form
        turns = [message for message in messages if isinstance(message, AIMessage)]
        prepared = any(not any(_is_turn(said, turns) for said in answer) for answer in earlier)
        return as_asked(form, question, prepared=prepared)

    def _begin(self, run: UUID, parent: UUID | None, inputs: Any) -> None:
        with self._lock:
            root = run if parent is None else self._of.get(parent, run)
            if root == run:
                self._wholes[run] = _Whole(_question(inputs))
            self._of[run] = root
            self._wholes[root].runs.add(run)
            while len(self._wholes) > _MOST:
                self._forget(next(iter(self._wholes)))

    def _end(self, run: UUID, answer: list[BaseMessage | str] | None = None, parent: UUID | None = None) -> None:
        with self._lock:
            root = self._of.get(run) or self._of.get(parent or _NOBODY)  # of a start LangChain may tell nothing
            if root == run:
                self._forget(run)
            elif root is not None and answer:
                self._wholes[root].answers[run] = answer

    def _forget(self, root: UUID) -> None:
        for run in self._wholes.pop(root).runs:
            del self._of[run]

    # What LangChain tells.

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **known: Any) -> None:
        """A chain, a graph or a part of one begins."""
        self._begin(run_id, known.get("parent_run_id"), inputs)

    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: UUID, **known: Any) -> None:
        """A tool begins."""
        self._begin(run_id, known.get("parent_run_id"), None)

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, **known: Any) -> None:
        """A retriever begins."""
        self._begin(run_id, known.get("parent_run_id"), None)

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **known: Any) -> None:
        """A model is asked."""
        self._begin(run_id, known.get("parent_run_id"), None)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **known: Any) -> None:
        """A chat model is asked."""
        self._begin(run_id, known.get("parent_run_id"), None)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **known: Any) -> None:
        """A model has answered."""
        made = [generation for several in response.generations for generation in several]
        said = [each.message if isinstance(each, ChatGeneration) else each.text for each in made]
        self._end(run_id, said, known.get("parent_run_id"))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **known: Any) -> None:
        """A chain has ended. Streams tell only now what it was given: the first of them was given the whole's input."""
        with self._lock:
            whole = self._wholes.get(self._of.get(run_id, _NOBODY))
            if whole is not None and whole.question is None:
                whole.question = _question(known.get("inputs"))
        self._end(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **known: Any) -> None:
        """A tool has ended."""
        self._end(run_id)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **known: Any) -> None:
        """A retriever has ended."""
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **known: Any) -> None:
        """A chain has failed."""
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **known: Any) -> None:
        """A tool has failed."""
        self._end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **known: Any) -> None:
        """A retriever has failed."""
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **known: Any) -> None:
        """A model has failed."""
        self._end(run_id)


def _witness() -> Witness:
    return WITNESS


_NOBODY = UUID(int=0)
WITNESS = Witness()
register_configure_hook(ContextVar[Any]("semgrad_guard_witness", default=WITNESS), inheritable=True)


def _is_turn(said: BaseMessage | str, turns: Sequence[AIMessage]) -> bool:
    """Whether an answer is one of these turns."""
    if isinstance(said, str):
        return any(turn.text == said for turn in turns)
    calls = getattr(said, "tool_calls", [])
    return any(turn.text == said.text and turn.tool_calls == calls for turn in turns)


def _question(inputs: Any) -> str | None:
    """What the user asks, as far as inputs tell."""
    if isinstance(inputs, str):
        return inputs or None
    if isinstance(inputs, PromptValue):
        return _question(inputs.to_messages())
    if isinstance(inputs, BaseMessage):
        return str(inputs.text) if inputs.type == "human" else None
    if isinstance(inputs, (list, tuple)):
        found = [_question(each) for each in cast("list[Any]", inputs) if isinstance(each, BaseMessage)]
        return next((each for each in reversed(found) if each is not None), None)
    if isinstance(inputs, Mapping):
        known = cast("Mapping[str, Any]", inputs)
        return next((asked for name in _QUESTIONS if (asked := _question(known.get(name))) is not None), None)
    return None
