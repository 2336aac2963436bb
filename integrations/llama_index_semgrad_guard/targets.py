"""Escalation targets: whatever may answer in an engine's place, and how it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import QueryBundle

from llama_index_semgrad_guard.records import completed, decided_of, text_of
from llama_index_semgrad_guard.streams import awhole, require_response, whole
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Refusal, Reply, off_loop

Answer = str | Verdict | Response | PydanticResponse
Target = BaseQueryEngine | LLM | Callable[[str], Answer | Awaitable[Answer]]
"""Somewhere to escalate to: a query engine (guarded or not), an LLM, or anything that answers a query string."""

ChatAnswer = str | Verdict | AgentChatResponse
ChatTarget = BaseChatEngine | LLM | Callable[[Sequence[ChatMessage]], ChatAnswer | Awaitable[ChatAnswer]]
"""Somewhere to escalate a conversation to: a chat engine, guarded or not, an LLM, or what answers messages."""

Said = Reply[Any] | Refusal


def ask(target: Target, query: QueryBundle, *, structured: bool) -> Said:
    """A target's answer to a query, where a structure is due if the draft was one; a stream is read to its end.

    Raises:
        InputError: the target is async, or answers with something else.
    """
    if isinstance(target, BaseQueryEngine):
        return _replied(whole(require_response(target.query(query)))[0], structured)
    if isinstance(target, LLM):
        return _replied(completed(target.complete(query.query_str)), structured)
    return _replied(_called(target, query.query_str, instead="aquery"), structured)


async def aask(target: Target, query: QueryBundle, *, structured: bool) -> Said:
    """As `ask`, without blocking the event loop."""
    if isinstance(target, BaseQueryEngine):
        answer, _ = await awhole(require_response(await target.aquery(query)))
        return _replied(answer, structured)
    if isinstance(target, LLM):
        return _replied(completed(await target.acomplete(query.query_str)), structured)
    return _replied(await _acalled(target, query.query_str), structured)


def ask_chat(target: ChatTarget, messages: list[ChatMessage]) -> Said:
    """A target's answer to a conversation, whose last message is the question.

    Raises:
        InputError: the target is async, or answers with something else.
    """
    if isinstance(target, BaseChatEngine):
        return _chat_reply(target.chat(messages[-1].content or "", chat_history=messages[:-1]))
    if isinstance(target, LLM):
        return _chat_reply(completed(target.chat(messages)))
    return _chat_reply(_called(target, messages, instead="achat"))


async def aask_chat(target: ChatTarget, messages: list[ChatMessage]) -> Said:
    """As `ask_chat`, without blocking the event loop."""
    if isinstance(target, BaseChatEngine):
        return _chat_reply(await target.achat(messages[-1].content or "", chat_history=messages[:-1]))
    if isinstance(target, LLM):
        return _chat_reply(completed(await target.achat(messages)))
    return _chat_reply(await _acalled(target, messages))


def _replied(answer: Any, structured: bool) -> Said:
    if structured and not isinstance(answer, PydanticResponse):
        return Refusal(f"The target must answer with a structure, not with a {type(answer).__name__}.")
    if isinstance(answer, (Response, PydanticResponse)):
        return Reply(decided_of(answer) or text_of(answer), answer)
    if isinstance(answer, (str, Verdict)):
        return Reply(answer)
    raise InputError(f"the escalation target returned a {type(answer).__name__}; a string or a response is due")


def _chat_reply(answer: Any) -> Said:
    if isinstance(answer, AgentChatResponse):
        return Reply(decided_of(answer) or text_of(answer), answer)
    if isinstance(answer, (str, Verdict)):
        return Reply(answer)
    raise InputError(f"the escalation target returned a {type(answer).__name__}; a string or a reply is due")


def _called(function: Callable[[Any], Any], question: Any, *, instead: str) -> Any:
    answer = function(question)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise InputError(f"the escalation target is async; use {instead}")
    return answer


async def _acalled(function: Callable[[Any], Any], question: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(question)
    answer = await off_loop(lambda: function(question))
    return await answer if inspect.isawaitable(answer) else answer
