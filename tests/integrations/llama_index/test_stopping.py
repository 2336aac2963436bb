"""A cancelled task and a closed stream stop the model, guarded or not; the next caller is not held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.chat_engine import SimpleChatEngine

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEvaluator, UncertaintyRouterCallback, guarded
from semgrad_guard import LanguageModel, Policy
from tests.steps import Steps, until, until_stopped

from .ways import reading

PASS, QUESTION = Policy(threshold=1e308, on_cut="score"), "Where is Paris?"
ROUTER = UncertaintyRouterCallback(PASS)
Ask = Callable[[SemGradLLM], Any]


@pytest.fixture
def endless(make_language_model: Callable[..., LanguageModel]) -> tuple[SemGradLLM, Any]:
    model = make_language_model(max_position_embeddings=4096)
    return SemGradLLM.from_model(model, max_tokens=3000, temperature=1.0, seed=1, router=ROUTER), model


WAYS: dict[str, Ask] = {
    "llm": lambda llm: llm.acomplete(QUESTION),
    "query": lambda llm: guarded(reading(llm), ROUTER).aquery(QUESTION),
    "stream": lambda llm: guarded(reading(llm, streaming=True), ROUTER).aquery(QUESTION),
    "chat": lambda llm: guarded(SimpleChatEngine.from_defaults(llm=llm), ROUTER).achat(QUESTION),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_stops_the_model(way: str, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    reached, steps = held(model)
    task = asyncio.ensure_future(_awaited(WAYS[way](llm)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await require_stopped(steps, llm)


async def test_a_cancelled_run_stops_the_model(endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    reached, steps = held(model)
    handler = ReActAgent(llm=llm, tools=[], streaming=False).run(user_msg=QUESTION)
    await reached.wait()
    await handler.cancel_run()
    await require_stopped(steps, llm)


async def test_a_cancelled_evaluation_waits_for_no_model(endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    before = threading.enumerate()
    with model.turn:
        task = asyncio.ensure_future(UncertaintyEvaluator(llm, PASS).aevaluate(query=QUESTION, response="There."))
        while not (begun := [thread for thread in threading.enumerate() if thread not in before]):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until(lambda: not any(thread.is_alive() for thread in begun))


def held(model: LanguageModel) -> tuple[asyncio.Event, Steps]:
    """The model waits at its fifth step until it gets the signal to stop; the event is set once it is there."""
    loop, reached, steps = asyncio.get_running_loop(), asyncio.Event(), Steps(model)
    steps.at(5, lambda: (loop.call_soon_threadsafe(reached.set), until_stopped()))
    return reached, steps


async def require_stopped(steps: Steps, llm: SemGradLLM) -> None:
    """The step at which the model was held is its last one, and the next caller gets an answer."""
    assert await asyncio.to_thread(steps.in_all) <= 5
    answer = await llm.model_copy(update={"max_tokens": 1}).acomplete(QUESTION)
    assert answer.raw["usage"]["completion_tokens"] == 1


async def _awaited(waiting: Any) -> Any:
    return await waiting


@pytest.mark.parametrize("mode", [None, "annotate"])
def test_a_closed_stream_stops_the_model(mode: Any, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    llm.router = None if mode is None else UncertaintyRouterCallback(PASS, mode=mode)
    pieces = llm.stream_complete(QUESTION)
    steps = Steps(model)
    steps.at(5, until_stopped)
    next(pieces)
    pieces.close()
    asyncio.run(require_stopped(steps, llm))
