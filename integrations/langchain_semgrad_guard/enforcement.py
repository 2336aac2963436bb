"""`EnforcingChatModel`: a chat model that carries out what an attached router decides, on every path.

The router decides in `on_llm_end`, while the run is open; the model acts after the run has closed. So traces hold the
model's own answer in a run that ends exactly once, LangChain's cache holds drafts only (each decided anew by the router
at hand), and what the caller gets is the outcome. Paths that are not overridden here open no docket, and the router
refuses them: forgetting a path fails loudly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from uuid import UUID

from langchain_core.callbacks import Callbacks
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, run_in_executor

from langchain_semgrad_guard.calls import Call, Outcome, has_router, merged, messages_of, router_of, settle, waiting
from langchain_semgrad_guard.deciding import DecidingChatModel
from langchain_semgrad_guard.docket import Docket, astepped, escalating, stepped
from langchain_semgrad_guard.messages import as_chunk
from langchain_semgrad_guard.relay import Relay


class EnforcingChatModel(DecidingChatModel):
    """Subclasses say how to answer (`_generate`, `_stream`); this class says what becomes of the answers.

    A guarded stream is a buffered one: the score exists only when the answer is complete, so an answer that may still
    be withheld arrives as one chunk. Without a router, and with one that only annotates or observes, streams are live.
    """

    def _prepare(self) -> None:
        """Whatever blocks before the first answer; async paths call it off the event loop."""

    def _together(self, calls: Sequence[Call], limit: int | None) -> AbstractContextManager[None]:
        """The time during which these calls are answered one after the other, at most `limit` at once."""
        return nullcontext()

    # The runs of one call, each closed before anything is decided about the next step.

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        run_name: str | None = None,
        run_id: UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each list of messages in a run of its own."""
        call = Call([], stop, callbacks, tags, metadata, run_name, run_id, kwargs)
        return merged(self._announced(self._answer(call.each(messages))), self._combine_llm_outputs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        run_name: str | None = None,
        run_id: UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Like `generate`, without blocking the event loop."""
        call = Call([], stop, callbacks, tags, metadata, run_name, run_id, kwargs)
        return merged(await self._aannounced(await self._aanswer(call.each(messages))), self._combine_llm_outputs)

    def _answer(self, calls: Sequence[Call], *, limit: int | None = None) -> list[Outcome]:
        """Draft everything, then ask each router's target for all that it does not let through."""
        self._prepare()
        with self._together(calls, limit):
            outcomes = [self._draft(call) for call in calls]
        for router, target, group in waiting(outcomes):
            inputs, configs = [o.call.messages for o in group], [o.target_config(limit) for o in group]
            with escalating(router):
                settle(group, target.batch(inputs, configs, return_exceptions=True))
        return outcomes

    async def _aanswer(self, calls: Sequence[Call], *, limit: int | None = None) -> list[Outcome]:
        await run_in_executor(None, self._prepare)
        with self._together(calls, limit):
            outcomes = [await self._adraft(call) for call in calls]
        for router, target, group in waiting(outcomes):
            inputs, configs = [o.call.messages for o in group], [o.target_config(limit) for o in group]
            with escalating(router):
                settle(group, await target.abatch(inputs, configs, return_exceptions=True))
        return outcomes

    def _announced(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            if announcement := outcome.announcement(self.get_name()):
                announcement.make()
        return outcomes

    async def _aannounced(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            if announcement := outcome.announcement(self.get_name()):
                await announcement.amake()
        return outcomes

    def _draft(self, call: Call) -> Outcome:
        try:
            docket = Docket(router_of(call.callbacks, self.callbacks), call.callbacks)
            with docket.opened():
                result = super().generate(**call.arguments(docket.router))
            return Outcome.of(call, docket, result)
        except Exception as error:  # noqa: BLE001 - raised once every other call of the batch has had its run
            return Outcome(call, error=error)

    async def _adraft(self, call: Call) -> Outcome:
        try:
            docket = Docket(router_of(call.callbacks, self.callbacks), call.callbacks)
            with docket.opened():
                result = await super().agenerate(**call.arguments(docket.router))
            return Outcome.of(call, docket, result)
        except Exception as error:  # noqa: BLE001 - raised once every other call of the batch has had its run
            return Outcome(call, error=error)

    # Batches: one generation for many inputs, and one batch of escalations.

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several inputs, each in a run of its own. `max_concurrency` bounds how many are generated at once."""
        calls, limit = self._calls(inputs, config, kwargs)
        outcomes = self._announced(self._answer(calls, limit=limit))
        return messages_of(outcomes, return_exceptions=return_exceptions)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Like `batch`, without blocking the event loop."""
        calls, limit = self._calls(inputs, config, kwargs)
        outcomes = await self._aannounced(await self._aanswer(calls, limit=limit))
        return messages_of(outcomes, return_exceptions=return_exceptions)

    def _calls(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None,
        kwargs: dict[str, Any],
    ) -> tuple[list[Call], int | None]:
        configs = get_config_list(config, len(inputs))
        stop, rest = kwargs.get("stop"), {key: value for key, value in kwargs.items() if key != "stop"}
        prompts = [self._convert_input(each).to_messages() for each in inputs]
        calls = [Call.configured(prompt, each, stop, rest) for prompt, each in zip(prompts, configs, strict=True)]
        return calls, configs[0].get("max_concurrency") if configs else None

    # Streams: live without a router, one chunk with one.

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; with a router attached, in one piece once it is let through."""
        self._prepare()
        docket = self._docket(config)
        if not docket.guards:
            yield from stepped(super().stream(input, config, stop=stop, **kwargs), docket.opened)
            return
        (call,), _ = self._calls([input], config, {**kwargs, "stop": stop})
        (outcome,) = self._answer([call])
        announcement = outcome.announcement(self.get_name())
        yield from announcement.stream() if announcement else [as_chunk(outcome.message)]

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, without blocking the event loop."""
        await run_in_executor(None, self._prepare)
        docket = self._docket(config)
        if not docket.guards:
            async for chunk in astepped(super().astream(input, config, stop=stop, **kwargs), docket.opened):
                yield chunk
            return
        (call,), _ = self._calls([input], config, {**kwargs, "stop": stop})
        (outcome,) = await self._aanswer([call])
        if announcement := outcome.announcement(self.get_name()):
            async for chunk in announcement.astream():
                yield chunk
        else:
            yield as_chunk(outcome.message)

    # Event streams: versions 1 and 2 are made of `stream`'s callbacks, version 3 of raw chunks that know no router.

    def stream_events(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        version: Literal["v1", "v2", "v3"] = "v2",
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answer as events; version 3 returns a `ChatModelStream`."""
        if version != "v3" or not has_router(ensure_config(config).get("callbacks"), self.callbacks):
            return super().stream_events(input, config, version=version, stop=stop, **kwargs)
        return Relay.events(self, input, ensure_config(config), stop=stop, **kwargs)

    def astream_events(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        version: Literal["v1", "v2", "v3"] = "v2",
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like `stream_events`; for version 3, await it to get an `AsyncChatModelStream`."""
        if version != "v3" or not has_router(ensure_config(config).get("callbacks"), self.callbacks):
            return super().astream_events(input, config, version=version, stop=stop, **kwargs)
        return Relay.aevents(self, input, ensure_config(config), stop=stop, **kwargs)

    def _docket(self, config: RunnableConfig | None) -> Docket:
        callbacks = ensure_config(config).get("callbacks")
        return Docket(router_of(callbacks, self.callbacks), callbacks)
