"""Deadlines and cancelled calls: the model stops within two steps, guarded or not, for the next caller."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import LanguageModel
from semgrad_guard.errors import DeadlineExceededError

from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, Route

LONG = 180


AFTER = "And now?"


def steps_of_the_next_answer(model: LanguageModel) -> int:
    """How many steps the next caller's answer takes by itself."""
    steps = Steps(model, 0, lambda: None)
    model.generate(AFTER)
    steps.remove()
    return steps.taken


class Steps:
    """Counts the decoding steps of a model; at one of them, something happens."""

    def __init__(self, model: LanguageModel, at: int, then: Callable[[], None]) -> None:
        self.taken, self._at, self._then = 0, at, then
        self.reached = threading.Event()
        self._handle: Any = model._model.register_forward_pre_hook(self._step, with_kwargs=True)

    def _step(self, module: Any, args: Any, kwargs: Any) -> None:
        self.taken += 1
        if self.taken == self._at:
            self.reached.set()
            self._then()

    def remove(self) -> None:
        self._handle.remove()


@pytest.fixture
def long(language_model: LanguageModel) -> ChatSemGrad:
    return ChatSemGrad.from_model(language_model, max_tokens=LONG, temperature=1.0, seed=3)


GUARDS: dict[str, Callable[[ChatSemGrad], Any]] = {
    "alone": lambda chat: chat,
    "guard": lambda chat: GuardedChatModel(chat, NOTHING),
    "annotating": lambda chat: GuardedChatModel(chat, EVERYTHING, mode="annotate"),
    "router": lambda chat: chat.with_config(callbacks=[UncertaintyRouterCallback(NOTHING)]),
}


@pytest.fixture(params=GUARDS)
def model(request: pytest.FixtureRequest, long: ChatSemGrad) -> Any:
    """A model that answers at length, guarded in every way and not at all."""
    return GUARDS[request.param](long)


async def _consumed(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("how", ["ainvoke", "abatch", "astream"])
def test_a_cancelled_task_stops_the_model(model: Any, language_model: LanguageModel, how: str) -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        calls = {
            "ainvoke": lambda: model.ainvoke(QUESTION),
            "abatch": lambda: model.abatch([QUESTION, "Where?"]),
            "astream": lambda: _consumed(model.astream(QUESTION)),
        }
        task = asyncio.ensure_future(calls[how]())
        cancelled = threading.Event()

        def cancel() -> None:  # on the model's thread, which waits until the task has been told
            loop.call_soon_threadsafe(lambda: (task.cancel(), loop.call_soon(loop.call_soon, cancelled.set)))
            cancelled.wait(10)

        steps = Steps(language_model, 5, cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(asyncio.to_thread(language_model.generate, AFTER), 60)  # once the model is free
        steps.remove()
        return steps.taken - own

    before, own = torch.get_num_threads(), steps_of_the_next_answer(language_model)
    assert asyncio.run(run()) <= 5 + 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["alone", "annotating"])
def test_a_stream_that_is_left_stops_the_model(
    long: ChatSemGrad, language_model: LanguageModel, name: str, asynchronous: bool
) -> None:
    model, own = GUARDS[name](long), steps_of_the_next_answer(language_model)
    closed = threading.Event()
    # Closing waits for the model, so the model must not wait for the end of closing: only until it has begun.
    steps = Steps(language_model, 5, lambda: closed.wait(1) and None)

    async def leave() -> None:
        stream = model.astream(QUESTION)
        await anext(stream)
        await stream.aclose()
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        closed.set()

    if asynchronous:
        asyncio.run(leave())
    else:
        stream = model.stream(QUESTION)
        next(stream)
        stream.close()
        closed.set()
    language_model.generate(AFTER)  # waits until the model is free
    steps.remove()
    assert steps.taken - own <= 5 + 2


@pytest.mark.parametrize("guard", ["alone", "guard", "router"])
def test_a_deadline_ends_the_answer(long: ChatSemGrad, language_model: LanguageModel, route: Route, guard: str) -> None:
    hurried = long.model_copy(update={"timeout": 0.05})
    late = threading.Event()
    steps = Steps(language_model, 3, lambda: late.wait(0.2) and None)
    with pytest.raises(DeadlineExceededError):
        route(GUARDS[guard](hurried), QUESTION, {})
    steps.remove()
    assert steps.taken <= 5


def test_a_late_answer_may_become_an_abstention(long: ChatSemGrad, language_model: LanguageModel) -> None:
    guard = GuardedChatModel(long, EVERYTHING, timeout=0.05, on_error="abstain")
    for name in ("invoke", "ainvoke", "stream", "astream"):
        late = threading.Event()
        steps = Steps(language_model, 3, lambda late=late: late.wait(0.2) and None)  # type: ignore[misc]
        assert "".join(piece.text for piece in ROUTES[name](guard, QUESTION, {})) == "I don't know."
        steps.remove()
