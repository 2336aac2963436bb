"""`Relay`: another model's stream as a chat model of its own, which LangChain can turn into typed event streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.utils.uuid import uuid7
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]
from pydantic import SkipValidation

from langchain_semgrad_guard.audience import is_audience, only
from langchain_semgrad_guard.messages import as_chunk


class Relay(BaseChatModel):
    """Says what `source` streams, decisions and all.

    LangChain makes version 3 of its event streams from a model's raw chunks, past `stream` and so past its router. A
    relay's raw chunks are what `source.stream` delivers. Its own run is heard by the audience only; everyone else
    hears the run of `source`.
    """

    source: Annotated[BaseChatModel, SkipValidation]
    heard_by_others: Any
    """The config of the run of `source`."""

    @classmethod
    def events(cls, source: BaseChatModel, question: LanguageModelInput, config: RunnableConfig, **kwargs: Any) -> Any:
        """What `source` streams in answer to a question, as a `ChatModelStream`."""
        relay, heard_by_audience = cls._of(source, config)
        with tracing_context(enabled=False):
            return relay.stream_events(question, heard_by_audience, version="v3", **kwargs)

    @classmethod
    async def aevents(
        cls, source: BaseChatModel, question: LanguageModelInput, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        """Like `events`, as an `AsyncChatModelStream`."""
        relay, heard_by_audience = cls._of(source, config)
        with tracing_context(enabled=False):
            return await relay.astream_events(question, heard_by_audience, version="v3", **kwargs)

    @classmethod
    def _of(cls, source: BaseChatModel, config: RunnableConfig) -> tuple[Relay, RunnableConfig]:
        """The relay for one call with this config, and the config of the relay's own run."""
        callbacks, run_id = config.get("callbacks"), config.get("run_id") or uuid7()
        others = {**config, "callbacks": only(callbacks, lambda handler: not is_audience(handler)), "run_id": run_id}
        name = config.get("run_name") or source.get_name()
        audience = {**config, "callbacks": only(callbacks, is_audience), "run_id": run_id, "run_name": name}
        relay = cls(source=source, heard_by_others=others, cache=False, verbose=False)
        return relay, cast("RunnableConfig", audience)

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard-relay"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = self.source.invoke(messages, self.heard_by_others, stop=stop, **kwargs)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for piece in self.source.stream(messages, self.heard_by_others, stop=stop, **kwargs):
            yield _chunk(piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self.source.astream(messages, self.heard_by_others, stop=stop, **kwargs):
            yield _chunk(piece)


def _chunk(piece: AIMessage) -> ChatGenerationChunk:
    """A piece of a stream; a model that does not stream delivers a message that is no chunk."""
    return ChatGenerationChunk(message=piece if isinstance(piece, AIMessageChunk) else as_chunk(piece))
