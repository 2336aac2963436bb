"""Who hears the runs that a guarded run makes inside itself (a served model's, a target's): tracers, and nobody else.

What is said there is a draft, or will be said once more when the guarded run ends. Handlers that show tokens to users
must therefore not hear it, and those that count tokens find the sum on the guarded run. Traces keep the inner runs:
where they stand, how long they took, what they cost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
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
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers._streaming import (  # LangGraph imports these too; there is no public name
    _StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
    _V2StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
)
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.context import (
    _configure_hooks,  # pyright: ignore[reportPrivateUsage] - handlers that come from the context; no public name
)

RunManager = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun


class TracingHandler(BaseCallbackHandler):
    """A handler of ours that traces, though it is not one of LangChain's tracers."""


def handlers_of(callbacks: Callbacks) -> Sequence[BaseCallbackHandler]:
    """The handlers among LangChain's several forms of callbacks."""
    return callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or []


def inside(run: RunManager | None) -> CallbackManager:
    """The callbacks of runs inside a run: its tracers."""
    if run is None:
        return CallbackManager(handlers=[])
    manager = CallbackManager(handlers=[], parent_run_id=run.run_id)
    manager.set_handlers([each for each in run.inheritable_handlers if _is_tracer(each)])
    manager.add_tags(run.inheritable_tags)
    manager.add_metadata(run.inheritable_metadata)
    return manager


def inside_stream(config: RunnableConfig, run_id: UUID) -> tuple[CallbackManager, CallbackManager]:
    """The callbacks of a stream's run, and those of runs inside it: LangChain does not tell a stream its run.

    The context's own tracers are among both, so that they are the same objects.
    """
    outer = CallbackManager.configure(config.get("callbacks"))
    inner = CallbackManager(handlers=[], parent_run_id=run_id)
    inner.set_handlers([each for each in outer.inheritable_handlers if _is_tracer(each)])
    inner.add_tags([*outer.inheritable_tags, *(config.get("tags") or [])])
    inner.add_metadata({**outer.inheritable_metadata, **(config.get("metadata") or {})})
    return outer, inner


@contextmanager
def tracers_only(heard: CallbackManager) -> Generator[RunnableConfig]:
    """The time of inner runs, and their config: also of those that are made without passing a config on.

    What a user has configured goes with it (LangGraph's own entries would make a target part of the graph around it).
    """
    around = ensure_config()
    kept = {key: value for key, value in around.get("configurable", {}).items() if not _is_langgraphs(key)}
    config = cast("RunnableConfig", {"callbacks": heard, "configurable": kept})
    if (limit := around.get("max_concurrency")) is not None:
        config["max_concurrency"] = limit
    hidden = [(hook[0], hook[0].set(None)) for hook in _configure_hooks if not _is_tracer_or_none(hook[0].get())]
    token = var_child_runnable_config.set(config)
    try:
        yield config
    finally:
        var_child_runnable_config.reset(token)
        for variable, before in hidden:
            variable.reset(before)


def _is_tracer(handler: Any) -> bool:
    shows = isinstance(handler, (_StreamingCallbackHandler, _V2StreamingCallbackHandler))
    return isinstance(handler, (BaseTracer, TracingHandler)) and not shows


def _is_tracer_or_none(handler: Any) -> bool:
    return handler is None or _is_tracer(handler)


def _is_langgraphs(key: str) -> bool:
    return key.startswith(("__pregel_", "checkpoint_"))
