"""Which handlers hear the runs that a guarded run makes inside itself.

A target's answer is delivered again when the guarded run ends: handlers that show tokens to users must not hear it, and
those that count tokens find the sum on the guarded run. Traces keep a target's runs, their times and costs
(`tracers_only`). A run inside the making of a draft may hold a text that will be withheld: no handler hears it
(`unheard`, `aside`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, Self, cast
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.runnables.utils import coro_with_context
from langchain_core.tracers._streaming import (  # LangGraph imports these too; there is no public name
    _StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
    _V2StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
)
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.context import (
    _configure_hooks,  # pyright: ignore[reportPrivateUsage] - handlers that come from the context; no public name
    tracing_v2_callback_var,
)
from langsmith import run_helpers
from pydantic import PrivateAttr

from langchain_semgrad_guard.runs import WITNESS

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
    """The time of a call with this config, for targets: LangChain does not pass a model's `configurable` on."""
    given = (config or {}).get("configurable")
    if not given:
        yield
        return
    known = var_child_runnable_config.get() or RunnableConfig()
    merged = cast("RunnableConfig", {**known, "configurable": {**known.get("configurable", {}), **given}})
    with _set((var_child_runnable_config, merged)):
        yield


def users_own(configurable: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own configuration. LangGraph's entries would make a target part of the graph around it."""
    return {key: value for key, value in configurable.items() if not key.startswith(("__pregel_", "checkpoint_"))}


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

    It may dispatch custom events, write to the graph's stream and interrupt; its subgraphs stream nothing.
    """
    config = ensure_config()
    callbacks: Any = config.get("callbacks")
    run_id = getattr(callbacks, "parent_run_id", None)
    manager = AsideManager(handlers=[], parent_run_id=run_id)
    manager.set_handlers([CustomEvents(handler, run_id) for handler in handlers_of(callbacks)])
    kept = {key: value for key, value in config.get("configurable", {}).items() if key != "__pregel_stream"}
    with _silence(cast("RunnableConfig", {**config, "callbacks": manager, "configurable": kept})):
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


class AloudChatModel(BaseChatModel):
    """A chat model that can be made to run in another context than the code that calls it (see `aside`)."""

    _context: Context | None = PrivateAttr(default=None)

    @property
    def context(self) -> Context | None:
        """The context in which it runs, if that is another than its caller's."""
        return self._context

    def aloud_in(self, context: Context) -> Self:
        """A copy whose runs are heard by those who hear this context."""
        copy = self.model_copy()
        copy._context = context
        return copy

    def invoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer one input."""
        if self._context is not None:
            invoked = partial(super().invoke, input, _aloud(config), stop=stop, **kwargs)
            return self._context.copy().run(invoked)
        with configured(config):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        """Like `invoke`, without blocking the event loop."""
        if self._context is not None:
            invoked = super().ainvoke(input, _aloud(config), stop=stop, **kwargs)
            return await coro_with_context(invoked, self._context.copy(), create_task=True)
        with configured(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)


def _aloud(config: RunnableConfig | None) -> RunnableConfig | None:
    """A config without the callbacks that code aside has: those of the context hold."""
    if config is None or not isinstance(config.get("callbacks"), AsideManager):
        return config
    return cast("RunnableConfig", {key: value for key, value in config.items() if key != "callbacks"})


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
