"""Naive ways of enforcing, kept as tests: each fails on a path that ours holds on."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback

from .support import EVENT_ROUTES, NOTHING, QUESTION, ROUTES, Ledger, Route, Wire, text_of


class TooUncertainError(Exception):
    """The error of a naive handler."""


class RaisesAtTheEnd(BaseCallbackHandler):
    raise_error = True
    run_inline = True

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        raise TooUncertainError


class RaisesAtTheEndAsync(AsyncCallbackHandler):
    raise_error = True

    async def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        raise TooUncertainError


class EditsTheResult(BaseCallbackHandler):
    run_inline = True

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        response.generations[0][0].message.content = "I don't know."  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["stream", "astream"])
def test_raising_at_the_end_comes_after_every_token(chat: ChatSemGrad, draft: str, wire: Wire, name: str) -> None:
    with pytest.raises(TooUncertainError):
        ROUTES[name](chat, QUESTION, {"callbacks": [wire, RaisesAtTheEnd()]})
    assert "".join(wire.tokens) == draft, "the whole rejected draft is out"
    wire.tokens.clear()
    ROUTES[name](chat, QUESTION, {"callbacks": [wire, UncertaintyRouterCallback(policy=NOTHING)]})
    assert "".join(wire.tokens) == "I don't know."


@pytest.mark.parametrize("name", ["invoke", "batch", "stream"])
def test_raising_in_an_async_handler_is_swallowed(chat: ChatSemGrad, draft: str, name: str) -> None:
    assert text_of(ROUTES[name](chat, QUESTION, {"callbacks": [RaisesAtTheEndAsync()]})) == draft
    assert text_of(ROUTES[name](chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})) != draft


def test_raising_at_the_end_leaves_the_run_open(chat: ChatSemGrad, ledger: Ledger) -> None:
    with pytest.raises(TooUncertainError):
        chat.invoke(QUESTION, {"callbacks": [RaisesAtTheEnd(), ledger]})
    assert len(ledger.opened) == 1
    assert ledger.closed == []


@pytest.mark.parametrize("name", ["stream", "astream"])
def test_editing_the_result_does_not_reach_streams(chat: ChatSemGrad, draft: str, name: str) -> None:
    assert text_of(ROUTES[name](chat, QUESTION, {"callbacks": [EditsTheResult()]})) == draft


def test_editing_the_result_poisons_the_cache(chat: ChatSemGrad, draft: str, cache: InMemoryCache) -> None:
    other = FakeListChatModel(responses=["Vienna"])
    other.invoke(QUESTION, {"callbacks": [EditsTheResult()]})
    assert other.invoke(QUESTION).text == "I don't know.", "an abstention, cached as the model's answer"
    chat.invoke(QUESTION, {"callbacks": [EditsTheResult()]})
    assert chat.invoke(QUESTION).text == draft, "what a handler edits is no part of the cache here"
    cache.clear()
    chat.invoke(QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})
    assert chat.invoke(QUESTION).text == draft


def test_fallbacks_do_not_fall_back_once_a_token_is_out(chat: ChatSemGrad, draft: str) -> None:
    guarded = chat.with_config(callbacks=[RaisesAtTheEnd()])
    chain = guarded.with_fallbacks([chat], exceptions_to_handle=(TooUncertainError,))
    reply: list[str] = []
    with pytest.raises(TooUncertainError):
        reply.extend(chunk.text for chunk in chain.stream(QUESTION))
    with pytest.raises(TooUncertainError):
        asyncio.run(_listen(chain, reply))
    assert draft in "".join(reply)


async def _listen(chain: Any, reply: list[str]) -> None:
    async for chunk in chain.astream(QUESTION):
        reply.append(chunk.text)


@pytest.mark.parametrize("handler", [RaisesAtTheEnd, RaisesAtTheEndAsync])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_raising_at_the_end_of_version_3_comes_too_late_or_is_swallowed(
    chat: ChatSemGrad, draft: str, handler: type[BaseCallbackHandler], asynchronous: bool
) -> None:
    config: Any = {"callbacks": [handler()]}
    reply: list[str] = []

    async def alisten() -> None:
        stream = await chat.astream_events(QUESTION, config, version="v3")
        async for text in stream.text:
            reply.append(text)
        assert (await stream.output).text == draft, "swallowed"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        if asynchronous:
            asyncio.run(alisten())
        else:
            with contextlib.suppress(TooUncertainError):  # of a handler that is not asynchronous
                for text in chat.stream_events(QUESTION, config, version="v3").text:
                    reply.append(text)
    assert "".join(reply) == draft, "the whole rejected draft is out"
    name = "astream_events v3" if asynchronous else "stream_events v3"
    guarded = EVENT_ROUTES[name](chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})
    assert text_of(guarded) == "I don't know."


def test_a_parser_drops_the_verdict(chat: ChatSemGrad, route: Route) -> None:
    """Why the verdict is read before the parser, or from the trace."""
    pieces = route(chat | StrOutputParser(), QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})
    assert not any(hasattr(piece, "response_metadata") for piece in pieces)
