"""A cancelled task and a closed stream stop the model, guarded or not; the next caller is not held up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.chat_engine import SimpleChatEngine

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, GuardedReActAgent, SemGradLLM
from semgrad_guard import LanguageModel, Policy

from .test_authorship import engine

PASS, QUESTION = Policy(threshold=1e308), "Where is Paris?"
Ask = Callable[[SemGradLLM], Any]


class Steps:
    """Counts the model's forward passes; when it has seen enough of them, something is done once."""

    def __init__(self, model: LanguageModel) -> None:
        self.count = 0
        self._at, self._do = 0, lambda: None
        layer = next(m for m in model._model.modules() if type(m).__name__.endswith("DecoderLayer"))  # type: ignore[attr-defined]
        self._handle = layer.register_forward_hook(self._seen)

    def at(self, count: int, do: Callable[[], Any]) -> None:
        self._at, self._do = count, do

    def _seen(self, *_: Any) -> None:
        self.count += 1
        if self.count == self._at:
            self._do()

    def remove(self) -> None:
        self._handle.remove()


@pytest.fixture
def endless(make_language_model: Callable[..., LanguageModel]) -> tuple[SemGradLLM, Any]:
    model = make_language_model(max_position_embeddings=4096)
    return SemGradLLM.from_model(model, max_tokens=3000, temperature=1.0, seed=1), model


WAYS: dict[str, Ask] = {
    "llm": lambda llm: llm.acomplete(QUESTION),
    "query": lambda llm: GuardedQueryEngine(engine(llm), PASS).aquery(QUESTION),
    "stream": lambda llm: GuardedQueryEngine(engine(llm, streaming=True), PASS).aquery(QUESTION),
    "chat": lambda llm: GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), PASS).achat(QUESTION),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_stops_the_model(way: str, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    steps, loop, reached = Steps(model), asyncio.get_running_loop(), asyncio.Event()
    steps.at(5, lambda: loop.call_soon_threadsafe(reached.set))
    task = asyncio.ensure_future(_awaited(WAYS[way](llm)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stopped(steps)
    answer = llm.model_copy(update={"max_tokens": 1}).complete(QUESTION)
    assert answer.raw["usage"]["completion_tokens"] == 1


async def test_a_cancelled_run_stops_the_model(endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    steps, loop, reached = Steps(model), asyncio.get_running_loop(), asyncio.Event()
    steps.at(5, lambda: loop.call_soon_threadsafe(reached.set))
    handler = GuardedReActAgent(llm=llm, policy=PASS).run(user_msg=QUESTION)
    await reached.wait()
    await handler.cancel_run()
    await stopped(steps)


async def stopped(steps: Steps) -> None:
    """At most two more decode steps come."""
    seen = steps.count
    await asyncio.sleep(0.5)
    assert steps.count <= seen + 2
    steps.remove()


async def _awaited(waiting: Any) -> Any:
    return await waiting


@pytest.mark.parametrize("guarded", [True, False])
def test_a_closed_stream_stops_the_model(guarded: bool, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    inner: Any = engine(llm, streaming=True)
    pieces = (GuardedQueryEngine(inner, PASS, mode="annotate") if guarded else inner).query(QUESTION).response_gen
    steps = Steps(model)
    next(pieces)
    pieces.close()
    asyncio.run(stopped(steps))
