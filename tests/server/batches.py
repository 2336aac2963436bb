"""Requests of a scheduler that are answered together, and the comparison with single requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.guard import Answerer, Draft
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.writing import AnswerRequest
from tests.engine.tiny_models import build
from tests.random_llama import byte_tokenizer

CHAT = "/v1/chat/completions"


Start = Callable[..., Scheduler]


Options = GenerationOptions


def request(text: str, **given: Any) -> AnswerRequest:
    """A request; what is no field of it is an option of its answers."""
    own = {name: given.pop(name) for name in ("count", "on_piece", "form", "prompt_limit") if name in given}
    return AnswerRequest(conversation=(Message("user", text),), options=Options(**{"max_tokens": 8, **given}), **own)


def require_alone(model: LanguageModel, wanted: AnswerRequest, drafts: Sequence[Draft[Answer]]) -> None:
    """A request's drafts are those of single requests for each of its answers."""
    assert len(drafts) == wanted.count
    for number, draft in enumerate(drafts):
        seed = None if wanted.options.seed is None else wanted.options.seed + number
        options = replace(wanted.options, seed=seed, grammar=wanted.form.grammar(model))
        answerer = Answerer(model, HybridGrad(), options=options)
        with model.turn:  # within it, in a run of its own
            [single] = answerer.drafts([wanted.conversation])
        generation, verdict = single.answer, single.verdict
        expected = (generation.text, generation.finish_reason, generation.completion_tokens, generation.cut)
        answer = draft.answer
        assert (answer.text, answer.finish_reason, answer.completion_tokens, draft.verdict.details.cut) == expected
        assert draft.verdict.status == verdict.status
        assert draft.verdict.reason == verdict.reason
        assert draft.verdict.uncertainty == pytest.approx(verdict.uncertainty, rel=1e-4)


@asynccontextmanager
async def all_at_once(scheduler: Scheduler, count: int, tasks: Sequence[asyncio.Task[Any]] = ()) -> AsyncIterator[None]:
    """The model is busy until as many requests wait; those of these tasks that were refused at once wait no more."""
    waiting = threading.Event()
    busy = asyncio.ensure_future(scheduler.work(waiting.wait))
    yield
    while scheduler.model.worker.depth + sum(task.done() for task in tasks) < count:
        await asyncio.sleep(0.001)
    waiting.set()
    await busy


async def answered(scheduler: Scheduler, requests: Sequence[AnswerRequest], *, together: bool = True) -> list[Any]:
    """The drafts, or the errors, of requests that begin together, or as they come."""
    if not together:
        return await asyncio.gather(*map(scheduler.answer, requests), return_exceptions=True)
    tasks = list[asyncio.Task[Any]]()
    async with all_at_once(scheduler, len(requests), tasks):
        tasks += [asyncio.ensure_future(scheduler.answer(wanted)) for wanted in requests]
    return await asyncio.gather(*tasks, return_exceptions=True)


class Listener:
    """Hears an answer, and does something once it has heard `count` pieces; notes every piece in `log`."""

    def __init__(self, name: str, log: list[str], *, at: int = -1, then: Callable[[], Any] = lambda: None) -> None:
        self.name, self.log, self.at, self.then = name, log, at, then
        self.pieces: list[str] = []

    def __call__(self, piece: str) -> None:
        self.pieces.append(piece)
        self.log.append(self.name)
        if len(self.pieces) == self.at:
            self.then()


MIXED = [
    request("hello"),
    request("a much longer question than the other ones are, with many words in it", max_tokens=12),
    request("x", temperature=1.3, seed=4, count=3),
    request("y", temperature=0.7, top_p=0.9, seed=11, max_tokens=5),
    request("z", max_tokens=1),
    request("w", stop=("a", "e", "i", "o"), max_tokens=20),
    request("g", form=AnswerForm(schema={"enum": ["yes", "no"]})),
    request("h", form=AnswerForm(schema={"type": "boolean"}), temperature=1.5, seed=1),
]


def fails() -> None:
    raise RuntimeError("gone")


def mixed(output: Any) -> Any:
    """A layer's output in which every row of a batch holds something of the others."""
    states = output[0] if isinstance(output, tuple) else output
    states = states + 0.3 * states.mean(0, keepdim=True)
    return (states, *output[1:]) if isinstance(output, tuple) else states


def of_kind(kind: str) -> LanguageModel:
    """A model whose requests join at any step, or run one by one."""
    model = build("llama", dtype=torch.float32, vocab_size=258, eos_token_id=257, pad_token_id=257)
    if kind == "none":  # rows that see each other
        layer: Any = model.get_submodule("model.layers.0")
        layer.register_forward_hook(lambda *call: mixed(call[2]))
    return LanguageModel.from_transformers(model, byte_tokenizer(), name=kind)
