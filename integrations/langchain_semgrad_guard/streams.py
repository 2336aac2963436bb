"""`StreamingChatModel`: the streams and batches of a chat model whose runs end with the outcome."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, Self, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import (
    ContextThreadPoolExecutor,
    ensure_config,
    get_config_list,
    run_in_executor,
)
from langchain_core.utils.uuid import uuid7

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from langchain_semgrad_guard.runs import AsyncRun, Config, Labels, SyncRun, around, inside_stream
from semgrad_guard import METADATA_KEY, Generation
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, HeldText, LiveAnswer, Stop, adrive, drive, off_loop, stopping


class StreamingChatModel(EnforcingChatModel):
    """A guarded stream is a buffered one: the score exists only when the answer is complete.

    An answer that may still be withheld therefore arrives as one chunk. Without a router, and with one that only
    annotates or observes, streams are live.
    """

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        if call.withholds:
            yield _only_chunk(drive(self._answered(call)))
        elif call.rules is not None:
            yield from self._judging(call.rules, call).streamed(partial(self._live, call))
        else:
            yield from self._unjudged_stream(call)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        if call.withholds:
            yield _only_chunk(await adrive(self._answered(call)))
            return
        live = call.rules and self._judging(call.rules, call).astreamed(partial(self._alive, call))
        async with aclosing(live or self._aunjudged_stream(call)) as pieces:
            async for piece in pieces:
                yield piece

    def _unjudged_stream(self, call: Call) -> Iterator[ChatGenerationChunk]:
        stop = Stop(self._limit)
        with stopping(stop):
            live = self._live(call)
        try:
            yield from live
            with stopping(stop):
                message = live.draft().answer
        finally:
            live.close()
        self._noticed(call, message)
        yield from live.last(message)

    async def _aunjudged_stream(self, call: Call) -> AsyncGenerator[ChatGenerationChunk]:
        stop = Stop(self._limit)
        with stopping(stop):
            live = await self._alive(call)
        try:
            async for piece in live:
                yield piece
            with stopping(stop):
                message = (await live.draft()).answer
        finally:
            await live.aclose()
        self._noticed(call, message)
        for piece in live.last(message):
            yield piece

    def stream(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; with a router that may withhold the answer, in one piece once it is let through."""
        self._ready()
        carrying, config = self._carrying(config)
        yield from super(StreamingChatModel, carrying).stream(input, config, stop=stop, **kwargs)

    async def astream(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Like `stream`, without blocking the event loop."""
        await run_in_executor(None, self._ready)
        carrying, config = self._carrying(config)
        async for chunk in super(StreamingChatModel, carrying).astream(input, config, stop=stop, **kwargs):
            yield chunk

    def _carrying(self, config: RunnableConfig | None) -> tuple[Self, RunnableConfig]:
        """A copy that carries the rules of one stream and its callbacks, and the config for it."""
        config = ensure_config(config)
        outer, name = around(config), config.get("run_name")
        tags = [*(config.get("tags") or []), *outer.inheritable_tags, *(self.tags or []), *([name] if name else [])]
        labels = Labels(frozenset(tags), {**outer.metadata, **(config.get("metadata") or {})})
        rules = self._rules_among(outer.handlers, labels)
        if rules is None:
            return self.left_alone() if labels.are_internal else self, config
        run_id = config.get("run_id") or uuid7()
        carrying = self.guarded_by(rules, inside_stream(outer, config, run_id), config)
        return carrying, cast("RunnableConfig", {**config, "callbacks": outer, "run_id": run_id})

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several inputs, each in a run of its own; those that are under way together share the model's steps.

        LangChain's own default is a few threads, by the number of processors.
        """
        configs = get_config_list(config, len(inputs))
        most = configs[0].get("max_concurrency", self._at_once) if configs else None
        stop = Stop()

        def one(given: LanguageModelInput, config: RunnableConfig) -> AIMessage | Exception:
            try:
                return self.invoke(given, config, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised once all others have had their run
                return error

        with stopping(stop), ContextThreadPoolExecutor(max_workers=most) as pool:
            try:
                ends = list(pool.map(one, inputs, configs))
            except BaseException:  # Ctrl-C: LangChain's own batch would wait for the answers
                stop.cancel()
                raise
        return _ended(ends, raises=not return_exceptions)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Like `batch`, without blocking the event loop."""
        return _ended(
            await super().abatch(inputs, config, return_exceptions=True, **kwargs), raises=not return_exceptions
        )


def _ended(ends: Any, *, raises: bool) -> list[AIMessage]:
    """The answers of a batch, all of whose runs have ended.

    Raises:
        Exception: the first one in an answer's place.
    """
    for end in ends:
        if raises and isinstance(end, Exception):
            raise end
    return ends


def _only_chunk(result: ChatResult) -> ChatGenerationChunk:
    """The one answer of a stream.

    Raises:
        InputError: there are several, whose pieces could not be told apart.
    """
    if len(result.generations) > 1:
        raise InputError(convert.several_in_a_stream(len(result.generations)))
    return convert.whole_chunk(result.generations[0])


# Answers while they are written, here or by a served model.


class Writing:
    """An answer that is being written: its pieces as LangChain's chunks, its scored draft, the chunks that close it."""

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        for piece in self.pieces:
            yield from self.chunks(piece)

    @abstractmethod
    def chunks(self, piece: Any) -> list[ChatGenerationChunk]:
        """The chunks that may be shown once a piece is written."""

    @abstractmethod
    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""

    @abstractmethod
    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the chunk that holds everything else."""

    def close(self) -> None:
        """Stop the model."""
        if (close := getattr(self.pieces, "close", None)) is not None:
            close()


class AsyncWriting:
    """Like `Writing`, on the event loop, from pieces that come there."""

    def __init__(self, writing: Writing, pieces: AsyncIterable[Any]) -> None:
        self._writing, self._pieces = writing, pieces
        self.last = writing.last

    async def __aiter__(self) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self._pieces:
            for chunk in self._writing.chunks(piece):
                yield chunk

    async def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return await off_loop(self._writing.draft)

    async def aclose(self) -> None:
        """Stop the model."""
        if (close := getattr(self._pieces, "aclose", None)) is not None:
            await close()


class LocalWriting(Writing):
    """An answer of a local model. `draft` makes the message's draft of the generation's.

    `end` is how much of the text may be shown: the start of a tool call is held back.
    """

    def __init__(
        self, live: LiveAnswer, *, draft: Callable[[Draft[Generation]], Draft[AIMessage]], end: Callable[[str], int]
    ) -> None:
        super().__init__(live)
        self.live, self._draft, self._end = live, draft, end
        self._written, self._shown = "", 0

    def chunks(self, piece: str) -> list[ChatGenerationChunk]:
        """The text that certainly belongs to no tool call."""
        self._written += piece
        end = self._end(self._written)
        if end <= self._shown:
            return []
        text, self._shown = self._written[self._shown : end], end
        return [_chunk(text)]

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return self._draft(self.live.draft())

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the record."""
        rest = convert.message_text(message)[self._shown :]
        record = convert.as_chunk(message).model_copy(update={"content": ""})
        last = ChatGenerationChunk(message=record, generation_info=convert.info_of(message))
        return [*([_chunk(rest)] if rest else []), last]


class Scoring(Protocol):
    """A model around a served one: it scores the served answers, and knows the rules for them."""

    def scored(self, call: Call, message: AIMessage) -> AIMessage: ...

    def draft_of(self, message: AIMessage, call: Call) -> Draft[AIMessage]: ...


class ServedWriting(Writing):
    """An answer of a served model. Its pieces are passed on as they are; the last one, with the score, is ours.

    `scored` pieces are a whole answer that has its score already.
    """

    def __init__(
        self, owner: Scoring, call: Call, pieces: Iterable[ChatGenerationChunk] = (), *, scored: bool = False
    ) -> None:
        super().__init__(pieces)
        self._owner, self._call, self._is_scored = owner, call, scored
        self._whole: ChatGenerationChunk | None = None
        self._held = HeldText()

    def chunks(self, piece: ChatGenerationChunk) -> list[ChatGenerationChunk]:
        """A piece, not yet the last. Text that may turn out to be reasoning is held back."""
        message = piece.message.model_copy(update={"chunk_position": None})
        passed = ChatGenerationChunk(message=message, generation_info=piece.generation_info)
        self._whole = passed if self._whole is None else self._whole + passed
        if isinstance(message.content, str) and message.content:
            message = message.model_copy(update={"content": self._held.add(message.content)})
        return [ChatGenerationChunk(message=message.model_copy(), generation_info=piece.generation_info)]

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        if self._whole is None:
            raise InputError("the model ended its stream without saying anything")
        whole = cast("AIMessage", message_chunk_to_message(self._whole.message))
        told = {key: held for key, held in (self._whole.generation_info or {}).items() if key in convert.TOLD}
        whole = whole.model_copy(update={"response_metadata": {**told, **whole.response_metadata}})
        scored = whole if self._is_scored else self._owner.scored(self._call, whole)
        return self._owner.draft_of(scored, self._call)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The record, and text that was held back."""
        metadata = message.response_metadata
        record = {METADATA_KEY: metadata[METADATA_KEY]} if METADATA_KEY in metadata else {}
        rest: dict[str, Any] = {"content": ""}
        if self._held.held and isinstance(message.content, str):
            kwargs = message.additional_kwargs
            thought = {name: kwargs[name] for name in ("reasoning_content",) if name in kwargs}
            rest = {"content": convert.message_text(message), "additional_kwargs": thought}
        return [ChatGenerationChunk(message=AIMessageChunk(**rest, response_metadata=record, chunk_position="last"))]


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))
