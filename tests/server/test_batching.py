"""Requests that share a model: each gets the answer of a single request, whichever other comes, goes or fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.engine.scores.tape import Memory
from semgrad_guard.errors import EmptyLayerSpanError, InputError, PromptTooLongError
from semgrad_guard.guard import Answerer, Draft
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.scheduler import AnswerRequest, Scheduler
from tests.engine.tiny_models import build
from tests.random_llama import byte_tokenizer

from .conftest import ALL, Serve, asking, events, question_of, watched

CHAT = "/v1/chat/completions"
Start = Callable[..., Scheduler]


def request(text: str, **given: Any) -> AnswerRequest:
    """A request; what is no field of it is an option of its answers."""
    own = {name: given.pop(name) for name in ("count", "on_piece", "form", "prompt_limit") if name in given}
    return AnswerRequest(
        conversation=(Message("user", text),), options=GenerationOptions(**{"max_tokens": 8, **given}), **own
    )


def require_alone(model: LanguageModel, wanted: AnswerRequest, drafts: Sequence[Draft[Answer]]) -> None:
    """A request's drafts are those of single requests for each of its answers."""
    assert len(drafts) == wanted.count
    for number, draft in enumerate(drafts):
        seed = None if wanted.options.seed is None else wanted.options.seed + number
        options = replace(wanted.options, seed=seed, grammar=wanted.form.grammar(model))
        answerer = Answerer(model, HybridGrad(), options=options)
        with model.turn:  # within it, in a run of its own
            [single] = answerer.drafting([wanted.conversation]).call()
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


def failing(at: int) -> Callable[[Any], None]:
    """A listener that fails at this piece."""
    pieces = itertools.count(1)

    def listen(_: Any) -> None:
        if next(pieces) == at:
            raise RuntimeError("gone")

    return listen


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


@pytest.mark.parametrize("together", [True, False])
async def test_everybody_gets_what_a_single_request_gets(
    start: Start, language_model: LanguageModel, together: bool
) -> None:
    scheduler = start()
    for wanted, drafts in zip(MIXED, await answered(scheduler, MIXED, together=together), strict=True):
        require_alone(language_model, wanted, drafts)
    assert scheduler.batching == "steps"


FAILING: list[tuple[AnswerRequest, type[Exception], str]] = [
    (request("a", form=AnswerForm(schema={"$ref": "#/nowhere"})), InputError, "schema"),
    (request("b", prompt_limit=3), PromptTooLongError, "takes 3"),
    (request("c" * 400), PromptTooLongError, "context window"),
    (request("d", on_piece=failing(1)), RuntimeError, "gone"),
    # The last letter may begin the stop string, and is held back until the end.
    (request("e", form=AnswerForm(schema={"const": "abcd"}), stop=('"x',),
             on_piece=failing(5)), RuntimeError, "gone"),
]  # fmt: skip


@pytest.mark.parametrize("failing", FAILING, ids=[case[0].conversation[0].content[0] for case in FAILING])
async def test_an_error_is_told_to_whose_it_is(
    start: Start, language_model: LanguageModel, failing: tuple[AnswerRequest, type[Exception], str]
) -> None:
    scheduler, (bad, kind, says) = start(), failing
    good = [request("q0"), request("q1", max_tokens=4, stop=('"x',)), request("q2", temperature=1.0, seed=2)]
    found = await answered(scheduler, [good[0], bad, *good[1:]])
    assert isinstance(found[1], kind)
    assert says in str(found[1])
    for wanted, drafts in zip(good, [found[0], *found[2:]], strict=True):
        require_alone(language_model, wanted, drafts)


@pytest.mark.parametrize("kind", ["steps", "none"])
async def test_every_kind_of_batching(start: Start, serve: Serve, kind: str) -> None:
    model = of_kind(kind)
    alike = [request("hello"), request("a longer question"), request("x", count=2)]
    requests = [*alike, request("late", max_tokens=3), request("y", temperature=1.0, seed=3, count=2)]
    scheduler, rows = start(model), list[int]()
    await scheduler.work(lambda: None)  # the model was looked at: those passes are no requests
    layer: Any = model.scorer.twin.layers[0]
    model.generate("Hi", GenerationOptions(max_tokens=1)).evidence.gradients()  # the self-check is no request
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(args[0])), with_kwargs=True)
    found = await answered(scheduler, requests)
    hook.remove()
    assert max(rows) == {"steps": 7, "none": 1}[kind]
    for wanted, drafts in zip(requests, found, strict=True):
        require_alone(model, wanted, drafts)
    async with serve(ALL, model=model, scheduler=scheduler) as client:
        [described] = (await client.get("/v1/models")).json()["data"]
        assert described["semgrad_guard"]["batching"] == kind
        pieces = events((await client.post(CHAT, json=asking("hello", stream=True))).text)
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == found[0][0].answer.text


def test_a_model_with_no_state_to_differentiate_is_refused_at_once(start: Start) -> None:
    sizes: dict[str, Any] = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    shallow = build("llama", dtype=torch.float32, **sizes, num_hidden_layers=2)
    with pytest.raises(EmptyLayerSpanError):
        start(LanguageModel.from_transformers(shallow, byte_tokenizer()))


async def test_the_queue_keeps_its_order_and_nobody_starves(
    start: Start, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs much room is not overtaken by those that would fit before it."""
    width = len(language_model.render("q0").ids) + 8
    three = 3 * width * language_model.scorer.exactness().token_bytes
    monkeypatch.setattr(language_model, "memory", Memory(running=three))
    scheduler = start()
    begun, _ = watched(scheduler)
    requests = [request(f"q{n}", count=3 if n == 2 else 1) for n in range(8)]
    async with all_at_once(scheduler, len(requests) + 1):
        tasks = [asyncio.ensure_future(scheduler.answer(wanted)) for wanted in requests[:5]]
        await asyncio.sleep(0)
        between = asyncio.ensure_future(scheduler.work(lambda: "work"))
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(scheduler.answer(wanted)) for wanted in requests[5:]]
    for wanted, task in zip(requests, tasks, strict=True):
        require_alone(language_model, wanted, await task)
    assert await between == "work"
    order = [question_of(job) for job in begun]
    assert order == [None, "q0", "q1", "q2", "q3", "q4", None, "q5", "q6", "q7"]
