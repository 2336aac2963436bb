"""Escalation targets: whatever may answer in an engine's place, and how it is asked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import PydanticResponse, Response, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import QueryBundle

from llama_index_semgrad_guard.records import completed
from llama_index_semgrad_guard.streams import awhole
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError

Answer = str | Verdict | Response | PydanticResponse
Target = BaseQueryEngine | LLM | Callable[[str], Answer | Awaitable[Answer]]
"""Somewhere to escalate to: a query engine (guarded or not), an LLM, or anything that answers a query string."""

Reply = str | Verdict | AgentChatResponse
ChatTarget = BaseChatEngine | LLM | Callable[[Sequence[ChatMessage]], Reply | Awaitable[Reply]]
"""Somewhere to escalate a conversation to: a chat engine, guarded or not, an LLM, or what answers messages."""


def ask(target: Target, query: QueryBundle) -> Any:
    """A target's answer to a query; a stream is read to its end.

    Raises:
        InputError: the target is async.
    """
    if isinstance(target, BaseQueryEngine):
        response = target.query(query)
        return response.get_response() if isinstance(response, StreamingResponse) else response
    if isinstance(target, LLM):
        return completed(target.complete(query.query_str))
    return _called(target, query.query_str, instead="aquery")


async def aask(target: Target, query: QueryBundle) -> Any:
    """As `ask`, without blocking the event loop."""
    if isinstance(target, BaseQueryEngine):
        return await awhole(await target.aquery(query))
    if isinstance(target, LLM):
        return completed(await target.acomplete(query.query_str))
    return await _acalled(target, query.query_str)


def ask_chat(target: ChatTarget, messages: list[ChatMessage]) -> Any:
    """A target's answer to a conversation, whose last message is the question.

    Raises:
        InputError: the target is async.
    """
    if isinstance(target, BaseChatEngine):
        return target.chat(messages[-1].content or "", chat_history=messages[:-1])
    if isinstance(target, LLM):
        return completed(target.chat(messages))
    return _called(target, messages, instead="achat")


async def aask_chat(target: ChatTarget, messages: list[ChatMessage]) -> Any:
    """As `ask_chat`, without blocking the event loop."""
    if isinstance(target, BaseChatEngine):
        return await target.achat(messages[-1].content or "", chat_history=messages[:-1])
    if isinstance(target, LLM):
        return completed(await target.achat(messages))
    return await _acalled(target, messages)


def _called(function: Callable[[Any], Any], question: Any, *, instead: str) -> Any:
    answer = function(question)
    if inspect.isawaitable(answer):
        raise InputError(f"the escalation target is async; use {instead}")
    return answer


async def _acalled(function: Callable[[Any], Any], question: Any) -> Any:
    answer = await asyncio.to_thread(function, question)
    return await answer if inspect.isawaitable(answer) else answer
