"""Answers that are being written, here or by a served model, and judged by the rules of the model around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, cast

from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import AsyncLiveAnswer, Call, LiveAnswer
from semgrad_guard import METADATA_KEY, Generation
from semgrad_guard.adapters.reasoning import HeldText
from semgrad_guard.errors import InputError
from semgrad_guard.guard import AsyncLiveAnswer as AsyncLiveText
from semgrad_guard.guard import Draft, off_loop
from semgrad_guard.guard import LiveAnswer as LiveText


class Writing:
    """An answer that a local model is writing, as LangChain's chunks.

    `draft` makes the scored draft of it. `end` says how much of the text may be shown: what may turn out to be a call
    is held back.
    """

    def __init__(
        self, live: LiveText, *, draft: Callable[[Generation], Draft[AIMessage]], end: Callable[[str], int]
    ) -> None:
        self.live, self._draft, self._end = live, draft, end
        self._written, self._shown = "", 0

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        for piece in self.live:
            yield from self.shown(piece)

    def shown(self, piece: str) -> list[ChatGenerationChunk]:
        """What may be shown once a piece is written."""
        self._written += piece
        end = self._end(self._written)
        if end <= self._shown:
            return []
        text, self._shown = self._written[self._shown : end], end
        return [_chunk(text)]

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return self._draft(self.live.stream.generation)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the chunk that says everything else."""
        rest = convert.message_text(message)[self._shown :]
        record = convert.as_chunk(message).model_copy(update={"content": ""})
        last = ChatGenerationChunk(message=record, generation_info=convert.info_of(message))
        return [*([_chunk(rest)] if rest else []), last]

    def close(self) -> None:
        """Stop the model."""
        self.live.close()


class AsyncWriting:
    """Like `Writing`, on the event loop."""

    def __init__(self, writing: Writing) -> None:
        self._writing, self._live = writing, AsyncLiveText(writing.live)
        self.last = writing.last

    async def __aiter__(self) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self._live:
            for chunk in self._writing.shown(piece):
                yield chunk

    async def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return await off_loop(self._writing.draft)

    async def aclose(self) -> None:
        """Stop the model."""
        await self._live.aclose()


class Scoring(Protocol):
    """A model around another one: scores what that said, and knows the rules for it."""

    def scored(self, call: Call, message: AIMessage) -> AIMessage: ...

    def draft_of(self, message: AIMessage, call: Call) -> Draft[AIMessage]: ...


class ServedWriting:
    """An answer that a served model is writing. Its pieces go on as they are; the last one, with the score, is ours.

    `scored` pieces are a whole answer that has its score already.
    """

    def __init__(
        self, owner: Scoring, call: Call, pieces: Iterator[ChatGenerationChunk], *, scored: bool = False
    ) -> None:
        self._owner, self._call, self._pieces, self._is_scored = owner, call, pieces, scored
        self._heard: ChatGenerationChunk | None = None
        self._held = HeldText()

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        for piece in self._pieces:
            yield self.passed_on(piece)

    def passed_on(self, piece: ChatGenerationChunk) -> ChatGenerationChunk:
        """A piece on its way: not yet the last. Text that may turn out to be reasoning is held back."""
        message = piece.message.model_copy(update={"chunk_position": None})
        passed = ChatGenerationChunk(message=message, generation_info=piece.generation_info)
        self._heard = passed if self._heard is None else self._heard + passed
        if isinstance(message.content, str) and message.content:
            message = message.model_copy(update={"content": self._held.add(message.content)})
        return ChatGenerationChunk(message=message.model_copy(), generation_info=piece.generation_info)

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        if self._heard is None:
            raise InputError("the model ended its stream without saying anything")
        whole = cast("AIMessage", message_chunk_to_message(self._heard.message))
        scored = whole if self._is_scored else self._owner.scored(self._call, whole)
        return self._owner.draft_of(scored, self._call)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The chunk that closes the stream: the record, and text that was held back."""
        record = (
            {METADATA_KEY: message.response_metadata[METADATA_KEY]} if METADATA_KEY in message.response_metadata else {}
        )
        said: dict[str, Any] = {"content": ""}
        if self._held.held and isinstance(message.content, str):
            kwargs = message.additional_kwargs
            thought = {name: kwargs[name] for name in ("reasoning_content",) if name in kwargs}
            said = {"content": convert.message_text(message), "additional_kwargs": thought}
        return [ChatGenerationChunk(message=AIMessageChunk(**said, response_metadata=record, chunk_position="last"))]

    def close(self) -> None:
        """Leave the stream."""
        if (close := getattr(self._pieces, "close", None)) is not None:
            close()


class AsyncServedWriting:
    """Like `ServedWriting`, on the event loop."""

    def __init__(
        self, owner: Scoring, call: Call, pieces: AsyncIterator[ChatGenerationChunk], *, scored: bool = False
    ) -> None:
        self._pieces, self._writing = pieces, ServedWriting(owner, call, iter(()), scored=scored)
        self.last = self._writing.last

    async def __aiter__(self) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self._pieces:
            yield self._writing.passed_on(piece)

    async def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return await off_loop(self._writing.draft)

    async def aclose(self) -> None:
        """Leave the stream."""
        if (close := getattr(self._pieces, "aclose", None)) is not None:
            await close()


class Judged:
    """A local model's answer, judged by the rules of the model around it."""

    def __init__(self, owner: Scoring, call: Call, live: LiveAnswer) -> None:
        self._owner, self._call, self._live = owner, call, live
        self.last, self.close = live.last, live.close

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        return iter(self._live)

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return self._owner.draft_of(self._live.draft().answer, self._call)


class AsyncJudged:
    """Like `Judged`, on the event loop."""

    def __init__(self, owner: Scoring, call: Call, live: AsyncLiveAnswer) -> None:
        self._owner, self._call, self._live = owner, call, live
        self.last, self.aclose = live.last, live.aclose

    def __aiter__(self) -> AsyncIterator[ChatGenerationChunk]:
        return aiter(self._live)

    async def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return self._owner.draft_of((await self._live.draft()).answer, self._call)


def as_pieces(drafted: Callable[[], ChatResult]) -> Iterator[ChatGenerationChunk]:
    """A whole answer as the pieces of a stream: one."""
    yield convert.whole_chunk(drafted().generations[0])


async def as_apieces(drafted: Callable[[], Awaitable[ChatResult]]) -> AsyncIterator[ChatGenerationChunk]:
    """Like `as_pieces`, on the event loop."""
    yield convert.whole_chunk((await drafted()).generations[0])


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))
