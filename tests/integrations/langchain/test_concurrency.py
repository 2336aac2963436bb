"""Decisions of calls that run at the same time do not mix."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import LanguageModel
from tests.steps import most_threads

from .scripted import Scripted
from .support import EVERYTHING, NOTHING, QUESTION


def _routers() -> list[UncertaintyRouterCallback]:
    strict = [UncertaintyRouterCallback(policy=NOTHING, abstain_message=f"No, {i}.") for i in range(6)]
    return [callback for router in strict for callback in (router, UncertaintyRouterCallback(policy=EVERYTHING))]


def _expected(draft: str) -> list[str]:
    return [text for i in range(6) for text in (f"No, {i}.", draft)]


def test_threads(chat: ChatSemGrad, draft: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        reply = pool.map(lambda router: chat.invoke(QUESTION, {"callbacks": [router]}).text, _routers())
    assert list(reply) == _expected(draft)


def test_tasks(chat: ChatSemGrad, draft: str) -> None:
    async def ask(router: UncertaintyRouterCallback, streamed: bool) -> str:
        if not streamed:
            return (await chat.ainvoke(QUESTION, {"callbacks": [router]})).text
        return "".join([chunk.text async for chunk in chat.astream(QUESTION, {"callbacks": [router]})])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(router, i % 3 == 0) for i, router in enumerate(_routers())))

    assert asyncio.run(ask_all()) == _expected(draft)


def test_one_router_for_many_calls(chat: ChatSemGrad) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message="No.")
    with ThreadPoolExecutor(6) as pool:
        reply = pool.map(lambda question: chat.invoke(question, {"callbacks": [router]}).text, ["a", "b", "c"] * 3)
    assert set(reply) == {"No."}


@pytest.mark.parametrize("of", ["model", "served"])
def test_asynchronous_calls_wait_in_no_threads(language_model: LanguageModel, of: str) -> None:
    chat = ChatSemGrad.from_model(language_model, max_tokens=2)
    guard = {
        "model": chat,
        "served": GuardedChatModel(Scripted(), UncertaintyRouterCallback(EVERYTHING), scorer=language_model),
    }[of]
    assert asyncio.run(most_threads(language_model, guard.ainvoke, 60)) <= 20
