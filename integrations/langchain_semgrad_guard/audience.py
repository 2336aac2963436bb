"""Handlers that show a run to a user while it goes on (event streams, LangGraph's message streams).

Tracers record what the model said, drafts included. An audience must hear nothing of a draft that may be withheld: it
is left out of guarded runs and of their escalations, and hears the outcome once, as if the model had said just that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers._streaming import (  # LangGraph imports these too; there is no public name
    _StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
    _V2StreamingCallbackHandler,  # pyright: ignore[reportPrivateUsage]
)
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]

from langchain_semgrad_guard.messages import as_chunk

Handlers = list[BaseCallbackHandler] | BaseCallbackManager


def is_audience(handler: BaseCallbackHandler) -> bool:
    """Whether a handler passes on to a user what it hears."""
    return isinstance(handler, (_StreamingCallbackHandler, _V2StreamingCallbackHandler))


def handlers_of(callbacks: Callbacks) -> Sequence[BaseCallbackHandler]:
    """The handlers among LangChain's several forms of callbacks."""
    return callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or []


def only(callbacks: Callbacks, keep: Callable[[BaseCallbackHandler], bool]) -> Handlers:
    """The same callbacks with some of their handlers; never None, which LangChain would fill in from its context."""
    if not isinstance(callbacks, BaseCallbackManager):
        return [handler for handler in callbacks or [] if keep(handler)]
    manager = callbacks.copy()
    manager.handlers = [handler for handler in manager.handlers if keep(handler)]
    manager.inheritable_handlers = [handler for handler in manager.inheritable_handlers if keep(handler)]
    return manager


@dataclass(frozen=True)
class Announcement:
    """A delivered message, the question it answers, and a config that holds the audience."""

    message: AIMessage
    question: list[BaseMessage]
    config: RunnableConfig

    def make(self) -> None:
        """Let the audience hear a run that says the message."""
        with tracing_context(enabled=False):
            Announcer.of(self.message).invoke(self.question, self.config)

    async def amake(self) -> None:
        """Like `make`, for an audience on the event loop."""
        with tracing_context(enabled=False):
            await Announcer.of(self.message).ainvoke(self.question, self.config)

    def stream(self) -> Iterator[AIMessageChunk]:
        """Like `make`, for a caller who streams: the run is open while its chunk is on its way."""
        chunks = Announcer.of(self.message).stream(self.question, self.config)
        with tracing_context(enabled=False):
            first = next(chunks)
        yield first
        yield from chunks

    async def astream(self) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, for an audience on the event loop."""
        chunks = Announcer.of(self.message).astream(self.question, self.config)
        with tracing_context(enabled=False):
            first = await anext(chunks)
        yield first
        async for chunk in chunks:
            yield chunk


@contextmanager
def unheard() -> Generator[None]:
    """The time during which the runs of this context have no audience."""
    config = var_child_runnable_config.get() or RunnableConfig()
    hushed: Handlers = only(config.get("callbacks"), lambda handler: not is_audience(handler))
    token = var_child_runnable_config.set({**config, "callbacks": hushed})
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


class Announcer(BaseChatModel):
    """Says one message, without a model and without LangChain's cache."""

    message: AIMessage

    @classmethod
    def of(cls, message: AIMessage, **fields: Any) -> Announcer:
        """A model that says this message; `fields` are those of every chat model."""
        return cls(message=message, cache=False, verbose=False, **fields)

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard-announcer"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Whatever tools there are, the message stays the same."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=as_chunk(self.message))

    def _should_use_protocol_streaming(self, **kwargs: Any) -> bool:
        """Never: the protocol's events bear an id of their own, and a graph would show the message twice."""
        return False
