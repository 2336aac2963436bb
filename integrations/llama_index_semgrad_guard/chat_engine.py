"""`GuardedChatEngine`: a chat engine around another, which says and remembers only what a policy lets through."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import BaseMemory

from llama_index_semgrad_guard.authorship import Aggregate, Answering, Delivery
from llama_index_semgrad_guard.calls import Turn
from llama_index_semgrad_guard.failures import asealed, sealed
from llama_index_semgrad_guard.memory import StagedMemory
from llama_index_semgrad_guard.passages import passages
from llama_index_semgrad_guard.routing import Guarded, Routing, require_guardable, require_target
from llama_index_semgrad_guard.streams import alive, live
from llama_index_semgrad_guard.targets import ChatTarget, aask_chat, ask_chat
from semgrad_guard import Policy
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    ABSTAIN_MESSAGE,
    AbstainMessage,
    DecisionSink,
    Draft,
    Mode,
    OnError,
    Outcome,
    ain_time,
    arun,
    cancelling,
    in_time,
    off_loop,
    one,
    run,
    stopping,
    unscored,
)


@dataclass
class GuardedChatStream(StreamingAgentChatResponse):
    """A streamed reply; `metadata` holds the record once the stream has ended."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class GuardedChatEngine(Guarded, BaseChatEngine):
    """Asks the inner chat engine, scores what its `SemGradLLM` generated, and answers, escalates or abstains.

        chat = GuardedChatEngine(index.as_chat_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        chat.chat("What is the capital of France?").metadata["semgrad_guard"]["action"]

    The score is that of the call whose text the reply is, as in `GuardedQueryEngine`; the call that condenses the
    question is another. The memory is the inner engine's own and holds what the user saw: a withheld draft never enters
    it. Where a turn ends with an error, `abstain_message` is remembered as the answer, so that the roles still
    alternate.

    Args:
        engine: a chat engine that keeps its conversation in `_memory`, as LlamaIndex's own do, and answers with a
            `SemGradLLM`; answers of other LLMs are unscored.
        policy: what to let through; `on_unscored` also decides about turns for which nothing was retrieved.
        escalate_to: asked, with the whole conversation, for what is not let through: a chat engine (it gets the
            conversation as its history), an LLM or a function. For a query engine, put a `CondenseQuestionChatEngine`
            around it.
        abstain_message, mode, aggregate, answering, keep_draft, on_error, timeout, monitor, log: as in
            `GuardedQueryEngine`.

    Raises:
        InputError: the engine is guarded already or has no memory, `escalate_to` cannot be asked, or a setting is none.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a turn, in mode "raise".
        AnswerFailedError: at a turn whose engine fails after its model was asked, where `on_error` is "raise".
        DeadlineExceededError: at a turn that takes longer than `timeout`, where `on_error` is "raise".
    """

    def __init__(
        self,
        engine: BaseChatEngine,
        policy: Policy,
        *,
        escalate_to: ChatTarget | None = None,
        abstain_message: AbstainMessage = ABSTAIN_MESSAGE,
        mode: Mode = "enforce",
        aggregate: Aggregate | None = None,
        answering: Answering | None = None,
        keep_draft: bool = False,
        on_error: OnError = "raise",
        timeout: float | None = None,
        monitor: DriftMonitor | None = None,
        log: DecisionSink | None = None,
    ) -> None:
        if not isinstance(engine, BaseChatEngine):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no type checker
            raise InputError(f"a {type(engine).__name__} is no chat engine; GuardedQueryEngine guards query engines")
        remedy = "a chat engine, an LLM or a function of the messages is due"
        require_target(escalate_to, policy, kinds=(BaseChatEngine, LLM), remedy=remedy)
        memory: BaseMemory | None = getattr(engine, "_memory", None)
        if memory is None:
            raise InputError(f"a {type(engine).__name__} keeps no conversation in `_memory`; guard its query engine")
        self._engine, self._memory, self.escalate_to = engine, memory, escalate_to
        self.routing = Routing.of(
            policy,
            source="chat_engine",
            mode=mode,
            can_escalate=escalate_to is not None,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            on_error=on_error,
            timeout=timeout,
            monitor=monitor,
            log=log,
            aggregate=aggregate,
            answering=answering,
        )
        require_guardable(engine, self.routing.terms)

    @property
    def chat_history(self) -> list[ChatMessage]:
        """What was said, as the user saw it."""
        return self._engine.chat_history

    def reset(self) -> None:
        """Forget the conversation."""
        self._engine.reset()

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer one turn; a `chat_history` is handed to the inner engine, most of which then go on from there."""
        said = _Said(self, message, chat_history)
        try:
            outcome = one(run(self.routing.terms, lambda: [said.draft()], said.target))
        except BaseException as error:
            said.memory.abandon(said.words(error))
            raise
        reply = said.reply(outcome)
        said.memory.settle(None if outcome.answer is said.response else reply.response)
        return reply

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """As `chat`, without blocking the event loop."""
        said = _Said(self, message, chat_history)

        async def drafts() -> list[Draft[AgentChatResponse]]:
            return [await said.adraft()]

        try:
            outcome = one(await arun(self.routing.terms, drafts, said.atarget))
        except BaseException as error:
            await said.memory.aabandon(said.words(error))
            raise
        reply = said.reply(outcome)
        await said.memory.asettle(None if outcome.answer is said.response else reply.response)
        return reply

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """Live where nothing is withheld; otherwise one piece, once the turn has been decided about."""
        terms = self.routing.terms
        if terms.withholds:
            reply = self.chat(message, chat_history)
            return replace(_buffered(reply), chat_stream=(chunk for chunk in [_chunk(reply.response, reply.response)]))
        turn, stop = Turn(message), terms.stop()
        with stopping(stop), turn.open():
            inner = self._engine.stream_chat(message, _copied(chat_history))
        stream = _alongside(inner)
        pieces = live(inner.response_gen, turn, self.routing, stream.metadata, stop=stop)
        stream.chat_stream = _chunks(pieces)
        return stream

    async def astream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """As `stream_chat`, without blocking the event loop."""
        terms = self.routing.terms
        if terms.withholds:
            reply = await self.achat(message, chat_history)
            return replace(_buffered(reply), achat_stream=_single(_chunk(reply.response, reply.response)))
        turn, stop = Turn(message), terms.stop()
        with stopping(stop), cancelling(stop), turn.open():
            inner = await self._engine.astream_chat(message, _copied(chat_history))
        stream = _alongside(inner)
        pieces = alive(cast("Any", inner.async_response_gen()), turn, self.routing, stream.metadata, stop=stop)
        stream.achat_stream = _achunks(pieces)
        return stream


class _Said:
    """One turn of the conversation under way."""

    def __init__(self, guard: GuardedChatEngine, message: str, chat_history: list[ChatMessage] | None) -> None:
        self._guard, self._message, self._history, self._routing = guard, message, chat_history, guard.routing
        self._kept: BaseMemory = guard._memory  # pyright: ignore[reportPrivateUsage] - this class is its other half
        self._turn = Turn(message)
        self.memory = StagedMemory(self._kept, self._turn)
        # A copy, because other turns may be under way on the same engine.
        self._engine: Any = copy.copy(guard._engine)  # pyright: ignore[reportPrivateUsage]
        self._engine._memory = self.memory
        self.response: AgentChatResponse | None = None

    # The inner engine's part.

    def draft(self) -> Draft[AgentChatResponse]:
        """Ask the inner engine, and score what it says."""
        return sealed(self._answered, self._turn, self._routing.terms)

    async def adraft(self) -> Draft[AgentChatResponse]:
        """As `draft`, without blocking the event loop."""
        return await asealed(self._aanswered(), self._turn, self._routing.terms)

    def _answered(self) -> Draft[AgentChatResponse]:
        with self._turn.open():
            self.response = _reply(in_time(lambda: self._engine.chat(self._message, _copied(self._history))))
        return self._scored()

    async def _aanswered(self) -> Draft[AgentChatResponse]:
        with self._turn.open():
            self.response = _reply(await ain_time(self._engine.achat(self._message, _copied(self._history))))
        return await off_loop(self._scored)

    def _scored(self) -> Draft[AgentChatResponse]:
        response = cast("AgentChatResponse", self.response)
        return self._routing.draft(self._turn, Delivery(response.response, response))

    # The target's part.

    def target(self, waiting: object) -> list[Any]:
        """Ask the target about the conversation, whose latest question is in the memory by now."""
        history = self._history
        messages = self._kept.get(input=self._message) if history is None else [*history, _question(self._message)]
        return [ask_chat(cast("ChatTarget", self._guard.escalate_to), messages)]

    async def atarget(self, waiting: object) -> list[Any]:
        """As `target`, without blocking the event loop."""
        history = self._history
        kept = await self._kept.aget(input=self._message) if history is None else [*history, _question(self._message)]
        return [await aask_chat(cast("ChatTarget", self._guard.escalate_to), kept)]

    # What goes out.

    def reply(self, outcome: Outcome[AgentChatResponse]) -> AgentChatResponse:
        """The reply for an outcome. Beside a text in the draft's place stand its passages, and no more of it."""
        verdict, response = outcome.verdict, outcome.answer
        if response is not self.response:
            self._turn.withhold()
        if response is None:
            nodes = passages(self.response.source_nodes, self._turn) if self.response else []
            metadata = self._routing.attached({}, verdict, self._turn)
            return AgentChatResponse(verdict.text, source_nodes=nodes, metadata=metadata)
        own = response.metadata if response is self.response else {}
        metadata = self._routing.attached(own, verdict, self._turn)
        if response is self.response:
            return replace(response, metadata=metadata)
        return AgentChatResponse(verdict.text, source_nodes=response.source_nodes, metadata=metadata)

    def words(self, error: BaseException) -> str:
        """What is remembered in the place of an answer that never came."""
        reason = f"the turn ended with a {type(error).__name__}"
        verdict = getattr(error, "verdict", None) or unscored("", reason=reason)
        return self._routing.terms.words(verdict)


def _copied(chat_history: list[ChatMessage] | None) -> list[ChatMessage] | None:
    """Memories keep the list they are given and add to it: the caller's must stay as it is."""
    return None if chat_history is None else list(chat_history)


def _reply(response: Any) -> AgentChatResponse:
    """What a chat engine of one's own may return, if it is a reply with a text."""
    if not isinstance(response, AgentChatResponse) or not isinstance(cast("Any", response.response), str):
        what = getattr(response, "response", response)
        raise InputError(f"the engine replied with a {type(what).__name__}; an AgentChatResponse with a text is due")
    return response


def _question(message: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=message)


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


async def _single(chunk: ChatResponse) -> AsyncGenerator[ChatResponse]:
    yield chunk


def _alongside(inner: StreamingAgentChatResponse) -> GuardedChatStream:
    return GuardedChatStream(sources=inner.sources, source_nodes=inner.source_nodes, is_writing_to_memory=False)


def _buffered(reply: AgentChatResponse) -> GuardedChatStream:
    return GuardedChatStream(
        response=reply.response,
        sources=reply.sources,
        source_nodes=reply.source_nodes,
        metadata=reply.metadata or {},
        is_writing_to_memory=False,
    )
