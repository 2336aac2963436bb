"""The runs around a model's call and inside it: what is known of those around, and which handlers hear those inside.

LangChain tells a chat model nothing of the runs around it. A `Witness` among the handlers of every run notes the
outermost one, its question, and the calls that came before, and passes nothing on.

A target's answer is delivered again when the guarded run ends: handlers that show tokens to users must not hear it, and
those that count tokens find the sum on the guarded run. Traces keep a target's runs, their times and costs
(`tracers_only`). A run inside the making of a draft may hold a text that will be withheld: no handler hears it
(`unheard`, `aside`).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers._streaming import (  # LangGraph imports these too; there is no public name
    _StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
    _V2StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
)
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.context import (
    _configure_hooks,  # pyright: ignore[reportPrivateUsage] - handlers that come from the context; no public name
    register_configure_hook,
    tracing_v2_callback_var,
)
from langsmith import run_helpers

from semgrad_guard.adapters.calls import as_asked
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


# Which handlers hear the runs inside.


RunManager = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun
SyncRun = CallbackManagerForLLMRun | None
AsyncRun = AsyncCallbackManagerForLLMRun | None
Config = RunnableConfig | None


class TracingHandler(BaseCallbackHandler):
    """A handler of ours that traces, though it is not one of LangChain's tracers."""


def handlers_of(callbacks: Callbacks) -> Sequence[BaseCallbackHandler]:
    """The handlers among LangChain's several forms of callbacks."""
    return callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or []


def around(config: RunnableConfig) -> CallbackManager:
    """The callbacks of a run with this config: those that it names, and those that the context adds."""
    return CallbackManager.configure(config.get("callbacks"))


def inside(run: RunManager | None) -> CallbackManager:
    """The callbacks of runs inside a run: its tracers."""
    if run is None:
        return CallbackManager(handlers=[])
    manager = CallbackManager(handlers=[], parent_run_id=run.run_id)
    manager.set_handlers(list(filter(_is_tracer, run.inheritable_handlers)))
    manager.add_tags(run.inheritable_tags)
    manager.add_metadata(run.inheritable_metadata)
    return manager


def inside_stream(outer: CallbackManager, config: RunnableConfig, run_id: UUID) -> CallbackManager:
    """The callbacks of runs inside a stream's run, whose own are `outer`: LangChain does not give a stream its run."""
    inner = CallbackManager(handlers=[], parent_run_id=run_id)
    inner.set_handlers(list(filter(_is_tracer, outer.inheritable_handlers)))
    inner.add_tags([*outer.inheritable_tags, *(config.get("tags") or [])])
    inner.add_metadata({**outer.inheritable_metadata, **(config.get("metadata") or {})})
    return inner


@contextmanager
def configured(config: RunnableConfig | None) -> Generator[None]:
    """The time of a call with this config, for targets and observers.

    LangChain does not pass a model's `configurable` on, and a batch's runs do not know the run around them.
    """
    known, given = var_child_runnable_config.get() or RunnableConfig(), config or RunnableConfig()
    changes: dict[str, Any] = {}
    if configurable := given.get("configurable"):
        changes["configurable"] = {**known.get("configurable", {}), **configurable}
    if isinstance(callbacks := given.get("callbacks"), BaseCallbackManager):
        changes["callbacks"] = callbacks
    with _set((var_child_runnable_config, {**known, **changes})) if changes else nullcontext():
        yield


def users_own(configurable: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own configuration. LangGraph's entries would make a run part of the graph around it."""
    return {key: value for key, value in configurable.items() if not key.startswith(("__pregel_", "checkpoint_"))}


def within_graph(configurable: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of code that is part of the graph around it: it may interrupt it and write to its stream.

    Of its own subgraphs nothing but their custom events is streamed.
    """
    stream: Any = configurable.get("__pregel_stream")
    custom = {} if stream is None else {"__pregel_stream": type(stream)(stream.__call__, {"custom"} & stream.modes)}
    return {**configurable, **custom}


@contextmanager
def tracers_only(callbacks: CallbackManager) -> Generator[RunnableConfig]:
    """The time of inner runs, and their config with the user's configuration, also for runs that no config reaches."""
    config = _inner_config(callbacks)
    hidden = [(hook[0], None) for hook in _configure_hooks if not (hook[0].get() is None or _is_tracer(hook[0].get()))]
    with _set((var_child_runnable_config, config), *hidden):
        yield config


@contextmanager
def unheard() -> Generator[None]:
    """The time of runs that may hold a text which will be withheld. No handler, tracer or span hears them."""
    with _silence(_inner_config(CallbackManager(handlers=[]))):
        yield


@contextmanager
def aside() -> Generator[None]:
    """Like `unheard`, for code of a graph around a guarded model, which stays a part of the graph.

    It may dispatch custom events, write to the graph's stream and interrupt.
    """
    config = ensure_config()
    callbacks: Any = config.get("callbacks")
    run_id = getattr(callbacks, "parent_run_id", None)
    manager = AsideManager(handlers=[], parent_run_id=run_id)
    manager.set_handlers([CustomEvents(handler, run_id) for handler in handlers_of(callbacks)])
    within = within_graph(config.get("configurable", {}))
    with _silence(cast("RunnableConfig", {**config, "callbacks": manager, "configurable": within})):
        yield


class AsideManager(CallbackManager):
    """The callbacks of code aside. LangChain passes them on in configs, where a model that runs aloud knows them."""


class CustomEvents(BaseCallbackHandler):
    """Passes custom events on to another handler, as those of one run, and nothing else."""

    ignore_llm = ignore_retry = ignore_chain = ignore_agent = ignore_retriever = ignore_chat_model = True  # pyright: ignore

    def __init__(self, handler: BaseCallbackHandler, run_id: UUID | None) -> None:
        self._handler, self._run_id = handler, run_id
        self.run_inline, self.raise_error = handler.run_inline, handler.raise_error
        if inspect.iscoroutinefunction(handler.on_custom_event):
            self.on_custom_event = self._on_custom_event_async  # LangChain looks whether it is a coroutine function

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **known: Any) -> Any:
        """Pass the event on."""
        return self._handler.on_custom_event(name, data, run_id=self._run_id or run_id, **known)

    async def _on_custom_event_async(self, name: str, data: Any, *, run_id: UUID, **known: Any) -> Any:
        await self._handler.on_custom_event(name, data, run_id=self._run_id or run_id, **known)


@contextmanager
def _silence(config: RunnableConfig) -> Generator[None]:
    """The time of runs with this config, which only its own handlers hear.

    LangSmith's tracer and OpenTelemetry's instrumentors join every run of their own accord: here they may not.
    """
    hooks = [hook for hook in _configure_hooks if hook[0].get() is not WITNESS]  # which passes nothing on
    hidden = [(hook[0], _SILENT if hook[3] else None) for hook in hooks]
    otel: Any = sys.modules.get("opentelemetry.instrumentation.utils")  # imported by every instrumentor
    with ExitStack() as stack:
        stack.enter_context(_set((var_child_runnable_config, config), (tracing_v2_callback_var, None), *hidden))
        stack.enter_context(cast("Any", run_helpers).tracing_context(enabled=False))
        stack.enter_context(nullcontext() if otel is None else otel.suppress_instrumentation())
        yield


_SILENT = BaseCallbackHandler()
"""Takes the place of a handler that LangChain would make because an environment variable is set."""


@contextmanager
def _set(*values: tuple[ContextVar[Any], Any]) -> Generator[None]:
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def _inner_config(callbacks: CallbackManager) -> RunnableConfig:
    """A config for runs that are no part of a graph around them."""
    known = ensure_config()
    config = cast("RunnableConfig", {"callbacks": callbacks, "configurable": users_own(known.get("configurable", {}))})
    if (limit := known.get("max_concurrency")) is not None:
        config["max_concurrency"] = limit
    return config


def _is_tracer(handler: Any) -> bool:
    shows = isinstance(handler, (_StreamingCallbackHandler, _V2StreamingCallbackHandler))
    return isinstance(handler, (BaseTracer, TracingHandler)) and not shows
