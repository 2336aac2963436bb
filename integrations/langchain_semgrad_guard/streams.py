"""`StreamingChatModel`: the streams of a chat model whose runs end with the outcome."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, run_in_executor
from langchain_core.utils.uuid import uuid7

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.callback import Labels
from langchain_semgrad_guard.enforcement import EnforcingChatModel, one_of
from langchain_semgrad_guard.hearing import around, inside_stream
from semgrad_guard.adapters.limits import Limit
from semgrad_guard.errors import InputError


class StreamingChatModel(EnforcingChatModel):
    """A guarded stream is a buffered one: the score exists only when the answer is complete.

    An answer that may still be withheld therefore arrives as one chunk. Without a router, and with one that only
    annotates or observes, streams are live.
    """

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        if call.withholds:
            yield _only_chunk(one_of(self._answers([call])))
        elif call.rules is not None:
            yield from self._judging(call.rules, [call]).streamed(partial(self._live, call))
        else:
            yield from self._unjudged_stream(call)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        if call.withholds:
            yield _only_chunk(one_of(await self._aanswers([call])))
            return
        live = call.rules and self._judging(call.rules, [call]).astreamed(partial(self._alive, call))
        async with aclosing(live or self._aunjudged_stream(call)) as pieces:
            async for piece in pieces:
                yield piece

    def _unjudged_stream(self, call: Call) -> Iterator[ChatGenerationChunk]:
        limit = Limit(self._limit)
        with limit.counting():
            live = self._live(call)
        try:
            yield from live
            with limit.counting():
                message = live.draft().answer
        finally:
            live.close()
        self._noticed(call, message)
        yield from live.last(message)

    async def _aunjudged_stream(self, call: Call) -> AsyncGenerator[ChatGenerationChunk]:
        limit = Limit(self._limit)
        with limit.counting():
            live = await self._alive(call)
        try:
            async for piece in live:
                yield piece
            with limit.counting():
                message = (await live.draft()).answer
        finally:
            await live.aclose()
        self._noticed(call, message)
        for piece in live.last(message):
            yield piece

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; with a router that may withhold the answer, in one piece once it is let through."""
        self._ready()
        carrying, config = self._carrying(config)
        yield from super(StreamingChatModel, carrying).stream(input, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, without blocking the event loop."""
        await run_in_executor(None, self._ready)
        carrying, config = self._carrying(config)
        async for chunk in super(StreamingChatModel, carrying).astream(input, config, stop=stop, **kwargs):
            yield chunk

    def _carrying(self, config: RunnableConfig | None) -> tuple[Self, RunnableConfig]:
        """A copy that knows the rules of one stream and its listeners, and the config for it."""
        config = ensure_config(config)
        outer, name = around(config), config.get("run_name")
        tags = [*(config.get("tags") or []), *outer.inheritable_tags, *(self.tags or []), *([name] if name else [])]
        labels = Labels(frozenset(tags), {**outer.metadata, **(config.get("metadata") or {})})
        rules = self._rules_among(outer.handlers, labels)
        if rules is None:
            return self.left_alone() if labels.are_internal else self, config
        run_id = config.get("run_id") or uuid7()
        carrying = self.guarded_by(rules, inside_stream(outer, config, run_id))
        carrying._config = config
        return carrying, cast("RunnableConfig", {**config, "callbacks": outer, "run_id": run_id})


def _only_chunk(result: ChatResult) -> ChatGenerationChunk:
    """The one answer of a stream.

    Raises:
        InputError: there are several, whose pieces nobody could tell apart.
    """
    if len(result.generations) > 1:
        raise InputError(convert.several_in_a_stream(len(result.generations)))
    return convert.whole_chunk(result.generations[0])
