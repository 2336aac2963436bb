"""What does not work, kept as tests: each naive way of enforcing fails on a path that ours holds on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.outputs import LLMResult

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback

from .support import NOTHING, QUESTION, ROUTES, Ledger, Wire, text_of


class TooUncertainError(Exception):
    """What a naive handler raises."""


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
    assert wire.tokens == []


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
    chat.invoke(QUESTION, {"callbacks": [EditsTheResult()]})
    assert chat.invoke(QUESTION).text == "I don't know.", "an abstention, cached as the model's answer"
    cache.clear()
    chat.invoke(QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})
    assert chat.invoke(QUESTION).text == draft


def test_fallbacks_do_not_fall_back_once_a_token_is_out(chat: ChatSemGrad, draft: str) -> None:
    guarded = chat.with_config(callbacks=[RaisesAtTheEnd()])
    chain = guarded.with_fallbacks([chat], exceptions_to_handle=(TooUncertainError,))
    said: list[str] = []
    with pytest.raises(TooUncertainError):
        said.extend(chunk.text for chunk in chain.stream(QUESTION))
    with pytest.raises(TooUncertainError):
        asyncio.run(_listen(chain, said))
    assert draft in "".join(said)


async def _listen(chain: Any, said: list[str]) -> None:
    async for chunk in chain.astream(QUESTION):
        said.append(chunk.text)
