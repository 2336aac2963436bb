"""Answers that other chat models are writing, judged by the rules of the model around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol, cast

from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.enforcement import AsyncLiveAnswer, LiveAnswer
from semgrad_guard import METADATA_KEY
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, off_loop


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

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        for piece in self._pieces:
            yield self.passed_on(piece)

    def passed_on(self, piece: ChatGenerationChunk) -> ChatGenerationChunk:
        """A piece on its way: not yet the last."""
        message = piece.message.model_copy(update={"chunk_position": None})
        passed = ChatGenerationChunk(message=message, generation_info=piece.generation_info)
        self._heard = passed if self._heard is None else self._heard + passed
        return ChatGenerationChunk(message=message.model_copy(), generation_info=piece.generation_info)

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        if self._heard is None:
            raise InputError("the model ended its stream without saying anything")
        whole = cast("AIMessage", message_chunk_to_message(self._heard.message))
        scored = whole if self._is_scored else self._owner.scored(self._call, whole)
        return self._owner.draft_of(scored, self._call)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The chunk that closes the stream: the record, and nothing else."""
        record = (
            {METADATA_KEY: message.response_metadata[METADATA_KEY]} if METADATA_KEY in message.response_metadata else {}
        )
        return [
            ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=record, chunk_position="last"))
        ]

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


def as_piece(result: ChatResult) -> ChatGenerationChunk:
    message = cast("AIMessage", result.generations[0].message)
    return ChatGenerationChunk(message=convert.as_chunk(message))


async def awaited(drafted: Any, call: Call) -> AsyncIterator[ChatGenerationChunk]:
    yield as_piece(await drafted(call))
