"""Escalation targets: engines, LLMs and functions that answer in an engine's place, and how they are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import QueryBundle

from llama_index_semgrad_guard.records import completed, decided_of, text_of
from llama_index_semgrad_guard.streams import require_response, whole
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Refusal, Reply, Steps, Work

Answer = str | Verdict | Response | PydanticResponse
Target = BaseQueryEngine | LLM | Callable[[str], Answer | Awaitable[Answer]]
"""Somewhere to escalate to: a query engine (guarded or not), an LLM, or a function of the query string."""

ChatAnswer = str | Verdict | AgentChatResponse
ChatTarget = BaseChatEngine | LLM | Callable[[Sequence[ChatMessage]], ChatAnswer | Awaitable[ChatAnswer]]
"""Somewhere to escalate a conversation to: a chat engine (guarded or not), an LLM, or a function of the messages."""


def ask(target: Any, query: QueryBundle, *, structured: bool) -> Steps[list[Reply[Any] | Refusal]]:
    """A target's answer to a query, where a structure is due if the draft was one; a stream is read to its end.

    Raises:
        InputError: the target is async, or answers with something else.
    """
    if isinstance(target, BaseQueryEngine):
        response = yield Work(lambda: target.query(query), lambda: target.aquery(query))
        answer, _ = yield from whole(require_response(response))
    elif isinstance(target, LLM):
        text = query.query_str
        answer = completed((yield Work(lambda: target.complete(text), lambda: target.acomplete(text))))
    else:
        answer = yield Work.calling(target, query.query_str, instead="aquery")
    if structured and not isinstance(answer, PydanticResponse):
        return [Refusal(f"The target must answer with a structure, not with a {type(answer).__name__}.")]
    return [_reply(answer, (Response, PydanticResponse))]


def ask_chat(target: Any, messages: list[ChatMessage]) -> Steps[list[Reply[Any] | Refusal]]:
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
    return [_reply(answer, (AgentChatResponse,))]


def _reply(answer: Any, kinds: tuple[type[Any], ...]) -> Reply[Any]:
    if isinstance(answer, kinds):
        return Reply(decided_of(answer) or text_of(answer), answer)
    if isinstance(answer, (str, Verdict)):
        return Reply(answer)
    raise InputError(f"the escalation target returned a {type(answer).__name__}; a string or a response is due")
