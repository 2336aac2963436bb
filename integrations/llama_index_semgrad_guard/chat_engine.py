"""`GuardedChatEngine`: a chat engine around another, which delivers and remembers only the answers let through."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Unpack, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import BaseMemory

from llama_index_semgrad_guard.authorship import Delivery, retrieved, with_passages
from llama_index_semgrad_guard.memory import StagedMemory
from llama_index_semgrad_guard.records import completed
from llama_index_semgrad_guard.routing import (
    Guarded,
    GuardOptions,
    Routing,
    judges_by_sentence,
    reply_of,
    require_guardable,
    require_target,
    sealed,
)
from llama_index_semgrad_guard.streams import GuardedPieces, live
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    Draft,
    Outcome,
    Refusal,
    Reply,
    SentencePiece,
    Steps,
    StreamSteps,
    Waiting,
    Work,
    adrive,
    answers,
    arun_stream,
    cancelling,
    drive,
    one,
    run_stream,
    stopping,
    streamed,
    unscored,
)

ChatAnswer = str | Verdict | AgentChatResponse
ChatTarget = BaseChatEngine | LLM | Callable[[Sequence[ChatMessage]], ChatAnswer | Awaitable[ChatAnswer]]
"""Somewhere to escalate a conversation to: a chat engine (guarded or not), an LLM, or a function of the messages."""

_BY_SENTENCE = (SimpleChatEngine, ContextChatEngine, CondensePlusContextChatEngine)
"""The engines whose stream is that of one call, and whose other results hold nothing of it."""


@dataclass
class GuardedChatStream(StreamingAgentChatResponse):
    """A streamed reply; `metadata` holds the record once the stream has ended."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class GuardedChatEngine(Guarded, BaseChatEngine):
    """Runs the inner chat engine, scores its `SemGradLLM`'s answer, and answers, escalates or abstains.

        chat = GuardedChatEngine(index.as_chat_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        chat.chat("What is the capital of France?").metadata["semgrad_guard"]["action"]

    The score is that of the call whose text the reply is, as in `GuardedQueryEngine`; the call that condenses the
    question is another. The memory is the inner engine's own and holds the conversation as the user saw it: a withheld
    draft never enters it. Where a message ends with an error, `abstain_message` is remembered as the answer, so that
    the roles still alternate.

    Args:
        engine: a chat engine that keeps its conversation in `_memory`, as LlamaIndex's own do, and answers with a
            `SemGradLLM`; answers of other LLMs are unscored.
        policy: which scores to let through; `on_unscored` also decides about messages for which nothing was retrieved.
        escalate_to: gets the whole conversation of an answer that is not let through: a chat engine (the conversation
            is its history), an LLM or a function. For a query engine, put a `CondenseQuestionChatEngine` around it.
        **options: the other settings of `GuardedQueryEngine`.

    Raises:
        InputError: the engine is guarded already or has no memory, `escalate_to` cannot answer, or a setting is unknown
            or out of its range.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a message, in mode "raise".
        AnswerFailedError: at a message whose engine fails after its model ran, where `on_error` is "raise".
        DeadlineExceededError: at a message that takes longer than `timeout`, where `on_error` is "raise".
    """

    def __init__(
        self,
        engine: BaseChatEngine,
        policy: Policy,
        *,
        escalate_to: ChatTarget | None = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        if not isinstance(engine, BaseChatEngine):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"a {type(engine).__name__} is no chat engine; GuardedQueryEngine guards query engines")
        remedy = "expected a chat engine, an LLM or a function of the messages"
        require_target(escalate_to, policy, kinds=(BaseChatEngine, LLM), remedy=remedy)
        memory: BaseMemory | None = getattr(engine, "_memory", None)
        if memory is None:
            raise InputError(f"a {type(engine).__name__} keeps no conversation in `_memory`; guard its query engine")
        self._engine, self._memory, self.escalate_to = engine, memory, escalate_to
        self.routing = Routing.of(policy, source="chat_engine", can_escalate=escalate_to is not None, **options)
        require_guardable(engine, self.routing.terms)
        self._by_sentence = judges_by_sentence(engine, self.routing, options) and isinstance(engine, _BY_SENTENCE)

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation as the user saw it."""
        return self._engine.chat_history

    def reset(self) -> None:
        """Forget the conversation."""
        self._engine.reset()

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer one message; `chat_history` is the inner engine's new history, which most engines then extend."""
        return drive(_Exchange(self, message, chat_history).answered())

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """As `chat`, without blocking the event loop."""
        return await adrive(_Exchange(self, message, chat_history).answered())

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """Live where nothing is withheld; otherwise one piece, once the answer has been decided about.

        By sentence, those that are let through as they end; the inner engine begins with the first of them that is
        read, and the memory holds those that were delivered. Passages and record are there once the stream has ended.
        """
        terms = self.routing.terms
        if terms.withholds:
            exchange = _Exchange(self, message, chat_history)
            if exchange.leaves_early:
                stream = GuardedChatStream(is_writing_to_memory=False)
                stream.chat_stream = _chunks(run_stream(exchange.by_sentence(stream)))
                return stream
            reply = drive(exchange.answered())
            return replace(_buffered(reply), chat_stream=(chunk for chunk in [_chunk(reply.response, reply.response)]))
        turn, stop = Turn(message), terms.stop()
        with stopping(stop), turn.open():
            inner = self._engine.stream_chat(message, _copied(chat_history))
        stream = _stream_of(inner)
        pieces = run_stream(live(inner.response_gen, turn, self.routing, stream.metadata, stop=stop))
        stream.chat_stream = _chunks(pieces)
        return stream

    async def astream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """As `stream_chat`, without blocking the event loop."""
        terms = self.routing.terms
        if terms.withholds:
            exchange = _Exchange(self, message, chat_history)
            if exchange.leaves_early:
                stream = GuardedChatStream(is_writing_to_memory=False)
                stream.achat_stream = _achunks(arun_stream(exchange.by_sentence(stream)))
                return stream
            reply = await adrive(exchange.answered())

            async def buffered() -> AsyncGenerator[ChatResponse]:
                yield _chunk(reply.response, reply.response)

            return replace(_buffered(reply), achat_stream=buffered())
        turn, stop = Turn(message), terms.stop()
        with stopping(stop), cancelling(stop), turn.open():
            inner = await self._engine.astream_chat(message, _copied(chat_history))
        stream = _stream_of(inner)
        steps = live(cast("Any", inner.async_response_gen()), turn, self.routing, stream.metadata, stop=stop)
        stream.achat_stream = _achunks(arun_stream(steps))
        return stream


class _Exchange:
    """One message of the user's, and its answer under way."""

    def __init__(self, guard: GuardedChatEngine, message: str, chat_history: list[ChatMessage] | None) -> None:
        self._target, self._message, self._history, self._routing = (
            guard.escalate_to,
            message,
            chat_history,
            guard.routing.now(),
        )
        self._kept: BaseMemory = guard._memory  # pyright: ignore[reportPrivateUsage] - this class is its other half
        self._turn = Turn(message)
        self._memory = StagedMemory(self._kept, self._turn)
        # A copy, because the engine may be answering other messages.
        self._engine: Any = copy.copy(guard._engine)  # pyright: ignore[reportPrivateUsage]
        self._engine._memory = self._memory
        self._response: AgentChatResponse | None = None
        if guard._by_sentence:  # pyright: ignore[reportPrivateUsage]
            self._turn.leaving = self._routing.leaving()

    @property
    def leaves_early(self) -> bool:
        """Whether sentences of a stream may leave while the answer is being written."""
        return self._turn.leaving is not None

    def by_sentence(self, stream: GuardedChatStream) -> StreamSteps[str, None]:
        """The sentences as they leave; at their end `stream` and the memory hold what was delivered."""
        terms, left, is_settled = self._routing.terms, "", False
        inner: Any = None
        history = _copied(self._history)

        def pieces() -> Generator[str]:
            nonlocal inner
            inner = self._engine.stream_chat(self._message, history)
            yield from inner.response_gen

        async def apieces() -> AsyncGenerator[str]:
            nonlocal inner
            inner = await self._engine.astream_chat(self._message, history)
            async with aclosing(inner.async_response_gen()) as source:
                try:
                    while (piece := await self._read(anext(source, None))) is not None:
                        yield piece
                finally:
                    await self._hang_up(inner)

        def hold(text: str) -> AgentChatResponse:
            self._response = AgentChatResponse(text, sources=inner.sources, source_nodes=inner.source_nodes)
            return self._response

        def show(step: Any) -> Any:
            nonlocal left, is_settled
            if isinstance(step, SentencePiece):
                left += step.text
                yield step.text
                return
            reply = self._reply(step)
            yield from self._memory.settle(None if step.answer is self._response else reply.response)
            is_settled = True
            stream.sources, stream.source_nodes = reply.sources, reply.source_nodes
            stream.metadata.update(reply.metadata or {})
            if rest := reply.response.removeprefix(left):
                yield rest

        reading = GuardedPieces(pieces, apieces, self._turn, self._routing, hold=hold)
        try:
            yield from streamed(terms, reading, self._ask, show=show)
        except BaseException as error:
            if not is_settled:
                yield from self._memory.abandon(left or terms.words(_ended_with(error)))
            raise

    async def _read(self, piece: Awaitable[str | None]) -> str | None:
        """A piece of the inner engine's. A cancelled reader stops the model first, as the engine waits for its end."""
        task = asyncio.ensure_future(piece)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._turn.stop()
            await asyncio.wait({task})
            raise

    async def _hang_up(self, inner: Any) -> None:
        """End the task that reads the model's stream, if it was stopped; closing `inner` would wait for its end."""
        if self._turn.is_stopped and (reading := inner.awrite_response_to_history_task) is not None:
            reading.cancel()
            await asyncio.wait({reading})
            inner.awrite_response_to_history_task = None

    def answered(self) -> Steps[AgentChatResponse]:
        """The reply, which is in the memory as well."""
        terms = self._routing.terms
        drafted = Work.of(lambda: sealed(self._drafts(), self._turn, terms))
        try:
            outcomes = yield from answers(terms, drafted, self._ask)
            outcome = one(outcomes)
        except BaseException as error:
            yield from self._memory.abandon(terms.words(_ended_with(error)))
            raise
        reply = self._reply(outcome)
        yield from self._memory.settle(None if outcome.answer is self._response else reply.response)
        return reply

    def _drafts(self) -> Steps[list[Draft[AgentChatResponse]]]:
        """The inner engine's reply with its score."""
        history = _copied(self._history)
        with self._turn.open():
            run = Work(
                lambda: self._engine.chat(self._message, history), lambda: self._engine.achat(self._message, history)
            )
            response = _reply((yield run.in_time()))
        self._response = response
        return [(yield Work(lambda: self._routing.draft(self._turn, Delivery(response.response, response))))]

    def _ask(self, waiting: Sequence[Waiting[AgentChatResponse]]) -> Work:
        """The work of the target on the conversation, whose last question is in the memory by now."""

        def steps() -> Steps[list[Any]]:
            if self._history is not None:
                messages = [*self._history, ChatMessage(role=MessageRole.USER, content=self._message)]
            else:
                question = self._message
                kept = Work(lambda: self._kept.get(input=question), lambda: self._kept.aget(input=question))
                messages = yield kept
            return (yield from _ask_target(self._target, messages))

        return Work.of(steps)

    def _reply(self, outcome: Outcome[AgentChatResponse]) -> AgentChatResponse:
        """The reply for an outcome; a text in the draft's place comes with the draft's passages alone.

        A target's answer behind delivered sentences comes with its own passages as well.
        """
        verdict, response = outcome.verdict, outcome.answer
        if response is not self._response:
            self._turn.withhold()
        if response is None or verdict.is_continued:
            nodes = retrieved(self._response.source_nodes, self._turn) if self._response else []
            nodes = with_passages(nodes, [] if response is None else response.source_nodes)
            metadata = self._routing.attached({}, verdict, self._turn)
            return AgentChatResponse(verdict.text, source_nodes=nodes, metadata=metadata)
        own = response.metadata if response is self._response else {}
        metadata = self._routing.attached(own, verdict, self._turn)
        if response is self._response:
            return replace(response, metadata=metadata)
        return AgentChatResponse(verdict.text, source_nodes=response.source_nodes, metadata=metadata)


def _ask_target(target: Any, messages: list[ChatMessage]) -> Steps[list[Reply[Any] | Refusal]]:
    """A target's answer to a conversation, whose last message is the question.

    Raises:
        InputError: the target is async, or answers with something else.
    """
    if isinstance(target, BaseChatEngine):
        question, history = messages[-1].content or "", messages[:-1]
        answer = yield Work(lambda: target.chat(question, history), lambda: target.achat(question, history))
    elif isinstance(target, LLM):
        answer = completed((yield Work(lambda: target.chat(messages), lambda: target.achat(messages))))
    else:
        answer = yield Work.calling(target, messages, instead="achat")
    return [reply_of(answer, (AgentChatResponse,))]


def _ended_with(error: BaseException) -> Verdict:
    """The verdict on a message that ended with an error."""
    reason = f"the message ended with a {type(error).__name__}"
    return getattr(error, "verdict", None) or unscored("", reason=reason)


def _copied(chat_history: list[ChatMessage] | None) -> list[ChatMessage] | None:
    """Memories keep the list they are given and add to it: the caller's must stay as it is."""
    return None if chat_history is None else list(chat_history)


def _reply(response: Any) -> AgentChatResponse:
    """An engine's reply, if it is one with a text: engines of the user's return any object."""
    if not isinstance(response, AgentChatResponse) or not isinstance(cast("Any", response.response), str):
        kind = type(getattr(response, "response", response)).__name__
        raise InputError(f"the engine replied with a {kind}; expected an AgentChatResponse with a text")
    return response


def _chunk(text: str, delta: str) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def _chunks(pieces: Generator[str]) -> Generator[ChatResponse]:
    text = ""
    try:
        for piece in pieces:
            text += piece
            yield _chunk(text, piece)
    finally:
        pieces.close()


async def _achunks(pieces: AsyncGenerator[str]) -> AsyncGenerator[ChatResponse]:
    text = ""
    try:
        async for piece in pieces:
            text += piece
            yield _chunk(text, piece)
    finally:
        await pieces.aclose()


def _stream_of(inner: StreamingAgentChatResponse) -> GuardedChatStream:
    return GuardedChatStream(sources=inner.sources, source_nodes=inner.source_nodes, is_writing_to_memory=False)


def _buffered(reply: AgentChatResponse) -> GuardedChatStream:
    return GuardedChatStream(
        response=reply.response,
        sources=reply.sources,
        source_nodes=reply.source_nodes,
        metadata=reply.metadata or {},
        is_writing_to_memory=False,
    )
