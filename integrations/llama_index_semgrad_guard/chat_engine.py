"""`GuardedChatEngine`: a chat engine around another, which says and remembers only what a policy lets through."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory

from llama_index_semgrad_guard.aggregation import Aggregate, aggregate_for
from llama_index_semgrad_guard.calls import CallCollector
from llama_index_semgrad_guard.memory import StagedMemory
from llama_index_semgrad_guard.query_engine import GuardedQueryEngine
from llama_index_semgrad_guard.records import get_verdict
from llama_index_semgrad_guard.routing import Router
from llama_index_semgrad_guard.targets import ChatTarget, aask_chat, ask_chat
from semgrad_guard import Policy, Verdict
from semgrad_guard.errors import InputError, LowConfidenceError
from semgrad_guard.guard import ABSTAIN_MESSAGE, abstained, escalated, require_sequel
from semgrad_guard.guard.modes import Mode


@dataclass
class GuardedChatStream(StreamingAgentChatResponse):
    """A streamed reply; `metadata` holds the record once the stream has ended."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class GuardedChatEngine(BaseChatEngine):
    """Asks the inner chat engine, scores what its `SemGradLLM` generated, and answers, escalates or abstains.

        chat = GuardedChatEngine(index.as_chat_engine(llm=SemGradLLM()), policy=Policy(threshold=0.004))
        chat.chat("What is the capital of France?").metadata["semgrad_guard"]["action"]

    The memory is the inner engine's own and holds what the user saw: a withheld draft never enters it. Of several
    calls in a turn (condensing the question, refining) the last one counts.

    Args:
        engine: a chat engine that keeps its conversation in `_memory`, as LlamaIndex's own do, and answers with a
            `SemGradLLM`; answers of other LLMs are unscored.
        policy: what to let through; `on_unscored` also decides about turns for which nothing was retrieved.
        escalate_to: asked, with the whole conversation, for what is not let through. A chat engine gets the
            conversation as its history. For a query engine, put a `CondenseQuestionChatEngine` around it.
        abstain_message: delivered instead of an answer that is neither let through nor escalated. In mode "raise" it
            is remembered as the answer, so that the roles in the memory still alternate.
        mode, keep_draft: as in `GuardedQueryEngine`.
        aggregate: which of a turn's calls count: "last" (the default; only that one is scored), "max" or "mean".

    Raises:
        InputError: the engine is guarded already, has no memory, or there is no such mode or aggregate.
        BindingMismatchError: at once, if the target's calibration does not follow this one's; at the first answer, if
            the policy was calibrated for something else.
        LowConfidenceError: at a turn, in mode "raise".
    """

    def __init__(
        self,
        engine: BaseChatEngine,
        policy: Policy,
        *,
        escalate_to: ChatTarget | None = None,
        abstain_message: str = ABSTAIN_MESSAGE,
        mode: Mode = "enforce",
        aggregate: Aggregate | None = None,
        keep_draft: bool = False,
    ) -> None:
        if isinstance(engine, GuardedChatEngine) or isinstance(
            getattr(engine, "_query_engine", None), GuardedQueryEngine
        ):
            raise InputError("the engine is guarded already; use escalate_to to chain guarded engines")
        memory: BaseMemory | None = getattr(engine, "_memory", None)
        if memory is None:
            raise InputError(f"a {type(engine).__name__} keeps no conversation in `_memory`; guard its query engine")
        self._engine, self._memory, self._escalate_to = engine, memory, escalate_to
        self._router = Router(
            policy=policy,
            source="chat_engine",
            mode=mode,
            abstain_message=abstain_message,
            keep_draft=keep_draft,
            can_escalate=escalate_to is not None,
            aggregate=aggregate_for(engine, aggregate),
        )
        if isinstance(escalate_to, GuardedChatEngine):
            require_sequel(policy, escalate_to._router.policy)

    @property
    def chat_history(self) -> list[ChatMessage]:
        """What was said, as the user saw it."""
        return self._engine.chat_history

    def reset(self) -> None:
        """Forget the conversation."""
        self._engine.reset()

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer one turn; a `chat_history` is handed to the inner engine, most of which then go on from there."""
        memory = StagedMemory(self._memory)
        with self._router.collecting() as collector:
            response = cast("AgentChatResponse", self._staged(memory).chat(message, _copied(chat_history)))
        try:
            verdict = self._decided(response, collector)
        except LowConfidenceError:
            memory.settle(self._router.abstain_message)
            raise
        target, answer = self._target(verdict), None
        if target is not None:
            answer = ask_chat(target, self._messages(message, chat_history))
        reply = self._reply(response, verdict, answer)
        memory.settle(None if reply.response == response.response else reply.response)
        return reply

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """As `chat`, without blocking the event loop."""
        memory = StagedMemory(self._memory)
        with self._router.collecting() as collector:
            response = cast("AgentChatResponse", await self._staged(memory).achat(message, _copied(chat_history)))
        try:
            verdict = await asyncio.to_thread(self._decided, response, collector)
        except LowConfidenceError:
            await memory.asettle(self._router.abstain_message)
            raise
        target, answer = self._target(verdict), None
        if target is not None:
            answer = await aask_chat(target, await self._amessages(message, chat_history))
        reply = self._reply(response, verdict, answer)
        await memory.asettle(None if reply.response == response.response else reply.response)
        return reply

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """Live where nothing is withheld; otherwise one piece, once the turn has been decided about."""
        if self._router.withholds:
            reply = self.chat(message, chat_history)
            return replace(_buffered(reply), chat_stream=(chunk for chunk in [_chunk(reply.response, reply.response)]))
        with self._router.collecting() as collector:
            inner = self._engine.stream_chat(message, _copied(chat_history))
        stream = GuardedChatStream(sources=inner.sources, source_nodes=inner.source_nodes, is_writing_to_memory=False)
        stream.chat_stream = self._live(inner, stream, collector)
        return stream

    async def astream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> GuardedChatStream:
        """As `stream_chat`, without blocking the event loop."""
        if self._router.withholds:
            reply = await self.achat(message, chat_history)
            return replace(_buffered(reply), achat_stream=_single(_chunk(reply.response, reply.response)))
        with self._router.collecting() as collector:
            inner = await self._engine.astream_chat(message, _copied(chat_history))
        stream = GuardedChatStream(sources=inner.sources, source_nodes=inner.source_nodes, is_writing_to_memory=False)
        stream.achat_stream = self._alive(inner, stream, collector)
        return stream

    # Deciding.

    def _staged(self, memory: StagedMemory) -> BaseChatEngine:
        """The inner engine for one turn; a copy, because other turns may be under way on the same engine."""
        engine: Any = copy.copy(self._engine)
        engine._memory = memory
        return engine

    def _decided(self, response: AgentChatResponse, collector: CallCollector) -> Verdict:
        return self._router.decided(response.response, collector.calls)

    def _target(self, verdict: Verdict) -> ChatTarget | None:
        """Who must answer instead."""
        return self._escalate_to if verdict.action == "escalate" and verdict.enforced else None

    def _reply(self, response: AgentChatResponse, verdict: Verdict, answer: Any) -> AgentChatResponse:
        """What is delivered. `sources` of a withheld answer go with it: they may quote it."""
        if verdict.action == "answer" or not verdict.enforced:
            return replace(response, metadata=self._router.attached(response.metadata, verdict))
        nodes = response.source_nodes
        if verdict.action == "abstain":
            final = abstained(verdict, self._router.abstain_message)
        elif isinstance(answer, (AgentChatResponse, StreamingAgentChatResponse)):
            final, nodes = escalated(verdict, get_verdict(answer) or str(answer)), answer.source_nodes
        elif isinstance(answer, (str, Verdict)):
            final = escalated(verdict, answer)
        else:
            raise InputError(f"the escalation target returned a {type(answer).__name__}; a string or a reply is due")
        return AgentChatResponse(final.text, source_nodes=nodes, metadata=self._router.attached({}, final))

    def _live(
        self, inner: StreamingAgentChatResponse, stream: GuardedChatStream, collector: CallCollector
    ) -> Generator[ChatResponse]:
        text = ""
        for piece in inner.response_gen:
            text += piece
            yield _chunk(text, piece)
        stream.metadata.update(self._router.attached({}, self._router.decided(text, collector.calls)))

    async def _alive(
        self, inner: StreamingAgentChatResponse, stream: GuardedChatStream, collector: CallCollector
    ) -> AsyncGenerator[ChatResponse]:
        text = ""
        async for piece in inner.async_response_gen():
            text += piece
            yield _chunk(text, piece)
        verdict = await asyncio.to_thread(self._router.decided, text, collector.calls)
        stream.metadata.update(self._router.attached({}, verdict))

    # Escalating.

    def _messages(self, message: str, chat_history: list[ChatMessage] | None) -> list[ChatMessage]:
        """The conversation with its latest question, which the inner engine has put into the memory by now."""
        return self._memory.get(input=message) if chat_history is None else [*chat_history, _question(message)]

    async def _amessages(self, message: str, chat_history: list[ChatMessage] | None) -> list[ChatMessage]:
        return await self._memory.aget(input=message) if chat_history is None else [*chat_history, _question(message)]


def _copied(chat_history: list[ChatMessage] | None) -> list[ChatMessage] | None:
    """Memories keep the list they are given and add to it: the caller's must stay as it is."""
    return None if chat_history is None else list(chat_history)


def _question(message: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=message)


def _chunk(text: str, delta: str) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


async def _single(chunk: ChatResponse) -> AsyncGenerator[ChatResponse]:
    yield chunk


def _buffered(reply: AgentChatResponse) -> GuardedChatStream:
    return GuardedChatStream(
        response=reply.response,
        sources=reply.sources,
        source_nodes=reply.source_nodes,
        metadata=reply.metadata or {},
        is_writing_to_memory=False,
    )
