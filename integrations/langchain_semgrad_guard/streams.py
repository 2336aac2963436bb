"""`StreamingChatModel`: the streams and batches of a chat model whose runs end with the outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Self, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.outputs import ChatGenerationChunk
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
from langchain_semgrad_guard.runs import AsyncRun, Config, SyncRun, around, inside_stream
from semgrad_guard import METADATA_KEY
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    Draft,
    HeldText,
    Iterated,
    LiveAnswer,
    Piece,
    ReportedSentences,
    SentencePiece,
    Steps,
    Stop,
    StreamSteps,
    Work,
    arun_stream,
    run_stream,
    stopping,
    written,
)


class StreamingChatModel(EnforcingChatModel):
    """An answer that may still be withheld arrives as one chunk, for its score exists only when it is complete.

    By sentence it arrives in those that are let through, as they end. Without a router, and with one that only
    annotates or observes, streams are live.
    """

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield from run_stream(self._streamed(self._call(messages, stop, run_manager, kwargs), is_async=False))

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        steps = self._streamed(self._call(messages, stop, run_manager, kwargs), is_async=True)
        async with aclosing(arun_stream(steps)) as pieces:
            async for piece in pieces:
                yield piece

    def _streamed(self, call: Call, *, is_async: bool) -> StreamSteps[ChatGenerationChunk, None]:
        writing = self._live(call, is_async=is_async)
        if writing is None:
            answers = (yield from self._answered(call)).generations
            if len(answers) > 1:
                raise InputError(convert.several_in_a_stream(len(answers)))
            yield convert.whole_chunk(answers[0])
        elif call.rules is not None:
            yield from self._judging(call.rules, call).streamed(writing)
        else:
            message = (yield from written(writing, Stop(self._limit), show=writing.chunks)).answer
            self._noticed(call, message)
            yield from writing.last(message)

    def stream(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; where a router may withhold the answer, as a whole or by sentence, as let through."""
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
        rules = self._rules_among(outer.handlers, frozenset(tags))
        if rules is None:
            return self, config
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


# Answers while they are written, here or by a served model.


class _Texts:
    """The chunks of an answer whose pieces are texts, thoughts, and sentences that are let through."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._shown, self._thought = 0, ""

    def chunks(self, piece: Piece | SentencePiece) -> list[ChatGenerationChunk]:
        """The piece as a chunk."""
        if isinstance(piece, SentencePiece):
            self._shown += len(piece.text)
            record = {convert.SENTENCES: [piece.sentence.model_dump(mode="json")]}
            return [ChatGenerationChunk(message=AIMessageChunk(content=piece.text, response_metadata=record))]
        if isinstance(piece, str):
            self._shown += len(piece)
            return [_chunk(piece)]
        self._thought += piece.text
        return [_chunk("", {convert.REASONING: piece.text})]

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the record."""
        rest = convert.message_text(message)[self._shown :]
        record = convert.as_chunk(message).model_copy(update={"content": ""})
        if self._thought and record.additional_kwargs.get(convert.REASONING) == self._thought:
            record.additional_kwargs = {
                name: v for name, v in record.additional_kwargs.items() if name != convert.REASONING
            }
        if not self._shown and not self._thought:
            record, rest = record.model_copy(update={"content": rest}), ""
        last = ChatGenerationChunk(message=record, generation_info=convert.info_of(message))
        return [*([_chunk(rest)] if rest else []), last]


class LocalWriting(_Texts, LiveAnswer):
    """An answer of a local model, read and begun with its first piece; the draft of its message at the end."""


Judge = Callable[[AIMessage, bool], Draft[AIMessage]]
"""The scored draft of a whole message; True: it was ended behind a doubtful sentence."""


class ServedWriting:
    """An answer of a served model. Its `pieces` are passed on as they are; the last one, with the score, is ours."""

    def __init__(self, pieces: Iterated[ChatGenerationChunk], judge: Judge) -> None:
        self._judge = judge
        self.next, self.close = pieces.next, pieces.close
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

    def draft(self, text: str | None = None) -> Work:
        """The whole answer with its score, which takes time; `text` is the part of it that counts, ended here."""
        return Work(lambda: self._draft(text))

    def _draft(self, text: str | None) -> Draft[AIMessage]:
        if self._whole is None:
            raise InputError("the model ended its stream without saying anything")
        whole = cast("AIMessage", message_chunk_to_message(_with_info(self._whole)))
        if text is not None:
            metadata = {**whole.response_metadata, "finish_reason": "stop"}
            whole = whole.model_copy(update={"content": text, "response_metadata": metadata})
        return self._judge(whole, text is not None)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The record, and text that was held back."""
        metadata = message.response_metadata
        record = {METADATA_KEY: metadata[METADATA_KEY]} if METADATA_KEY in metadata else {}
        rest: dict[str, Any] = {"content": ""}
        if self._held.held and isinstance(message.content, str):
            kwargs = message.additional_kwargs
            thought = {name: kwargs[name] for name in (convert.REASONING,) if name in kwargs}
            rest = {"content": convert.message_text(message), "additional_kwargs": thought}
        return [ChatGenerationChunk(message=AIMessageChunk(**rest, response_metadata=record, chunk_position="last"))]


class ReportedWriting(_Texts):
    """An answer of a served model, in the sentences that its log-probabilities let through; the rest at its end.

    Behind a sentence that ends the answer the model is left: closing the pieces hangs up.
    """

    def __init__(self, pieces: Iterated[ChatGenerationChunk], judge: Judge, early: ReportedSentences) -> None:
        super().__init__()
        self._live, self._pieces, self._early = ServedWriting(pieces, judge), pieces, early
        self.close = pieces.close

    def next(self) -> Work:
        """As `Live.next`."""
        return Work.of(self._let_through)

    def _let_through(self) -> Steps[list[SentencePiece] | None]:
        if self._early.is_over or (pieces := (yield self._pieces.next())) is None:
            return None
        found = list[SentencePiece]()
        for piece in cast("list[ChatGenerationChunk]", pieces):
            self._live.chunks(piece)
            message = _with_info(piece)
            found += self._early.add(convert.message_text(message), convert.logprobs_of(message))
        return found

    def draft(self) -> Work:
        """The whole answer with its score; one that is over ends with its last sentence."""
        return self._live.draft(self._early.text if self._early.is_over else None)


def _with_info(piece: ChatGenerationChunk) -> AIMessageChunk:
    """The message of a chunk, and the fields in it that its server gives outside of it."""
    message = cast("AIMessageChunk", piece.message)
    outside = {key: held for key, held in (piece.generation_info or {}).items() if key in convert.BESIDE}
    return message.model_copy(update={"response_metadata": {**outside, **message.response_metadata}})


def _chunk(text: str, further: Mapping[str, Any] | None = None) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text, additional_kwargs=dict(further or {})))
