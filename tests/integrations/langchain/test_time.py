"""Deadlines and cancelled calls: the model stops within the step in which it is cancelled, guarded or not."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.errors import DeadlineExceededError
from tests.steps import Gate, Steps, until, until_stopped

from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, Route

LONG = 180


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

        def cancel() -> None:  # in the model's thread
            loop.call_soon_threadsafe(task.cancel)
            until(task.done)

        steps = Steps(language_model)
        steps.at(5, cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(steps.in_all)

    before = torch.get_num_threads()
    assert asyncio.run(run()) == 5
    assert language_model.generate("And now?", GenerationOptions(max_tokens=2)).response_ids
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread here")
def test_an_interrupted_batch_stops_every_run(
    long: ChatSemGrad, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is withheld, and the other one is written for those that hear it."""
    threads = threading.enumerate()
    steps, main, gate = Steps(language_model), threading.get_ident(), Gate(monkeypatch)

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        until(lambda: all(ticket._stop.cancelled for ticket in gate.tickets))

    steps.at(5, interrupt)
    configs: Any = [{"callbacks": [UncertaintyRouterCallback(NOTHING)]}, {}]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            long.batch([QUESTION, "Where?"], configs, stream=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps.in_all() <= 6
    until(lambda: not [thread for thread in threading.enumerate() if thread not in threads])
    assert language_model.generate("And now?", GenerationOptions(max_tokens=2)).response_ids


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["alone", "annotating"])
def test_a_stream_that_is_left_stops_the_model(
    long: ChatSemGrad, language_model: LanguageModel, name: str, asynchronous: bool
) -> None:
    model, steps = GUARDS[name](long), Steps(language_model)
    steps.at(5, until_stopped)

    async def leave() -> None:
        stream = model.astream(QUESTION)
        await anext(stream)
        await stream.aclose()
        gc.collect()

    if asynchronous:
        asyncio.run(leave())
    else:
        stream = model.stream(QUESTION)
        next(stream)
        stream.close()
    assert steps.in_all() <= 5
    assert language_model.generate("And now?", GenerationOptions(max_tokens=2)).response_ids


@pytest.mark.parametrize("guard", ["alone", "guard", "router"])
def test_a_deadline_ends_the_answer(long: ChatSemGrad, language_model: LanguageModel, route: Route, guard: str) -> None:
    hurried = long.model_copy(update={"timeout": 0.05})
    steps = Steps(language_model)
    steps.at(3, until_stopped)
    with pytest.raises(DeadlineExceededError):
        route(GUARDS[guard](hurried), QUESTION, {})
    assert steps.in_all() <= 3


def test_a_late_answer_may_become_an_abstention(long: ChatSemGrad, language_model: LanguageModel) -> None:
    guard = GuardedChatModel(long, EVERYTHING, timeout=0.05, on_error="abstain")
    for name in ("invoke", "ainvoke", "stream", "astream"):
        steps = Steps(language_model)
        steps.at(3, until_stopped)
        assert "".join(piece.text for piece in ROUTES[name](guard, QUESTION, {})) == "I don't know."
        steps.in_all()
