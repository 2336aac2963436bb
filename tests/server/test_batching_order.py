"""Which requests share a model, in which order they are answered, and the traces that they leave."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from semgrad_guard import LanguageModel
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.errors import (
    AnswerInterruptedError,
    EmptyLayerSpanError,
)
from tests.engine.chat_templates import template
from tests.engine.tiny_models import build
from tests.leaks import objects_alive, smallest_growth
from tests.pairwise import every
from tests.random_llama import CALLS, byte_tokenizer
from tests.steps import until
from tests.whole_runs import whole_run

from .batches import (
    CHAT,
    Listener,
    Options,
    Start,
    all_at_once,
    answered,
    fails,
    of_kind,
    refuses,
    request,
    require_alone,
)
from .conftest import ALL, Serve, asking, events, question_of, watched

HYBRID = ("jamba", "falcon-h1", "lfm2", "qwen3-next", "mamba2", "recurrent-gemma")


@pytest.mark.parametrize("name", every(3, HYBRID))
async def test_where_layers_keep_a_state_prompts_of_equal_length_run_together(start: Start, name: str) -> None:
    """Those in between run by themselves, in the order in which they came; none waits for what came later."""
    model = of_kind(name)
    scheduler, rows = start(model), list[int]()
    requests = [
        request("hello"), request("a longer question"), request("world"), request("other", temperature=1.0, seed=3),
        request("a longer questioo"), request("words", max_tokens=3), request("x" * 5), request("y" * 5, stop=("a",)),
    ]  # fmt: skip
    await scheduler.work(lambda: None)
    begun, _ = watched(scheduler)
    whole_run(model, "Hi", Options(max_tokens=1)).evidence.gradients()
    layer: Any = model._scorer.twin.layers[0]
    hook = layer.register_forward_pre_hook(lambda *call: rows.append(len(next(iter((*call[1], *call[2].values()))))),
                                           with_kwargs=True)  # fmt: skip
    found = await answered(scheduler, requests)
    hook.remove()
    assert scheduler.batching == "equal_lengths"
    assert max(rows) == 6
    order = [question for job in begun if (question := question_of(job))]
    assert order == ["hello", "world", "other", "words", "xxxxx", "yyyyy", "a longer question", "a longer questioo"]
    for wanted, drafts in zip(requests, found, strict=True):
        require_alone(model, wanted, drafts)


async def test_other_work_is_passed_by_once(start: Start) -> None:
    """What is between two requests that run together begins next."""
    scheduler = start(of_kind("equal_lengths"))
    begun, _ = watched(scheduler)
    async with all_at_once(scheduler, 4):
        first = asyncio.ensure_future(scheduler.answer(request("one")))
        await asyncio.sleep(0)
        between = asyncio.ensure_future(scheduler.work(lambda: "work"))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(scheduler.answer(request(text))) for text in ("two", "longer")]
    await asyncio.gather(first, between, *rest)
    order = [question_of(job) for job in begun]
    assert order == [None, "one", "two", None, "longer"]


@pytest.mark.parametrize("kind", ["steps", "equal_lengths"])
async def test_a_prompt_that_breaks_the_pass_breaks_its_own(start: Start, kind: str) -> None:
    model = of_kind(kind)
    assert model.joins == (kind == "steps")
    refuses(model, "QXQ")
    good = [request("q0"), request("q1")]
    found = await answered(start(model), [good[0], request("QXQ"), good[1]])
    assert isinstance(found[1], ValueError)
    for wanted, drafts in zip(good, (found[0], found[2]), strict=True):
        require_alone(model, wanted, drafts)


async def test_a_short_room_behind_one_prompt_does_not_shorten_anothers_answer(start: Start) -> None:
    model = of_kind("steps")
    window = model.context_window
    assert window is not None
    before = len(model.render("x").ids) - 1
    requests = [request("hello", max_tokens=8), request("x" * (window - before - 3), max_tokens=8)]
    for wanted, drafts in zip(requests, await answered(start(model), requests), strict=True):
        require_alone(model, wanted, drafts)
        assert drafts[0].answer.completion_tokens == (8 if wanted is requests[0] else 3)


async def test_a_model_that_changes_ends_what_it_was_writing_and_not_what_comes(
    start: Start, make_language_model: Callable[..., LanguageModel]
) -> None:
    model = make_language_model(seed=3)
    scheduler, loop, log = start(model), asyncio.get_running_loop(), list[str]()
    came, late = list[asyncio.Task[Any]](), request("late")

    def changes() -> None:
        with torch.no_grad():
            model._model.get_output_embeddings().weight.mul_(1.1)
        loop.call_soon_threadsafe(lambda: came.append(asyncio.ensure_future(scheduler.answer(late))))
        while scheduler.depth == 0:
            threading.Event().wait(0.001)

    early = request("early", max_tokens=50, on_piece=Listener("early", log, at=2, then=changes))
    with pytest.raises(AnswerInterruptedError, match="changed while it wrote"):
        await scheduler.answer(early)
    require_alone(model, late, await came[0])


async def test_what_cannot_join_is_written_by_itself(start: Start) -> None:
    """Where frequencies follow the longest row; a model with no state to differentiate is refused at once."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
    sizes: dict[str, Any] = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    longer = build("phi3", dtype=torch.float32, **sizes, original_max_position_embeddings=50, rope_parameters=rope)
    requests = [
        request("hello"),
        request("a question of forty letters, or some more"),
        request("x" * 15, max_tokens=13),
    ]
    model = LanguageModel.from_transformers(longer, byte_tokenizer())
    for wanted, drafts in zip(requests, await answered(start(model), requests), strict=True):
        require_alone(model, wanted, drafts)
    shallow = build("llama", dtype=torch.float32, **sizes, num_hidden_layers=2)
    with pytest.raises(EmptyLayerSpanError):
        start(LanguageModel.from_transformers(shallow, byte_tokenizer()))


def test_a_model_that_cannot_be_looked_at_is_not_served(
    start: Start, make_language_model: Callable[..., LanguageModel]
) -> None:
    model = make_language_model(seed=5)
    model._model.model.layers[0].register_forward_hook(lambda *_: fails())
    with pytest.raises(RuntimeError, match="gone"):
        start(model)


async def test_the_queue_keeps_its_order_and_nobody_starves(
    start: Start, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs much room is not overtaken by those that would fit before it."""
    width = len(language_model.render("q0").ids) + 8
    three = 3 * width * language_model._scorer.exactness().token_bytes
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


async def test_a_steady_stream_of_short_requests_does_not_hold_up_a_large_one(
    start: Start, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = len(language_model.render("large").ids) + 8
    three = 3 * width * language_model._scorer.exactness().token_bytes
    monkeypatch.setattr(language_model, "memory", Memory(running=three))
    scheduler, done = start(), list[str]()
    stopped = asyncio.Event()

    async def again_and_again(name: str) -> None:
        while not stopped.is_set():
            await scheduler.answer(request(name, max_tokens=3))
            done.append(name)

    short = [asyncio.ensure_future(again_and_again(f"s{n}")) for n in range(3)]
    begun, _ = watched(scheduler)
    while not done:
        await asyncio.sleep(0.001)
    large, before = request("large", temperature=1.0, seed=1, count=3), len(begun)
    drafts = await scheduler.answer(large)
    stopped.set()
    await asyncio.gather(*short)
    require_alone(language_model, large, drafts)
    order = [question_of(job) for job in begun]
    assert order.index("large") - before <= 3, "only those that came before it begin before it"


@pytest.mark.parametrize("kind", ["steps", "none"])
async def test_nothing_is_kept_of_requests_that_are_done(start: Start, kind: str) -> None:
    scheduler = start(of_kind(kind))
    requests = [request(f"q{n}", max_tokens=4 + n) for n in range(3)]
    ghosts = [weakref.ref(wanted) for wanted in requests]
    found = await answered(scheduler, requests)
    ghosts += [weakref.ref(drafts[0].answer) for drafts in found]
    del requests, found
    await scheduler.work(lambda: None)  # the model's thread has gone on
    until(lambda: gc.collect() is not None and not any(ghost() for ghost in ghosts))


async def test_many_answers_leave_as_many_objects_as_a_few(start: Start) -> None:
    scheduler = start()

    async def objects(rounds: int) -> int:
        for _ in range(rounds):
            await answered(scheduler, [request(f"q{n}", max_tokens=2) for n in range(4)])
        await scheduler.work(lambda: None)
        return objects_alive()

    counts = [await objects(10) for _ in range(5)]  # before the first, whatever is made once has been made
    assert smallest_growth(counts) < 20, counts  # a leak of one object an answer grows by 40


PARAMETERS = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}


PAINT = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": PARAMETERS}}


FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": PARAMETERS}}


async def test_tools_and_forms_beside_plain_requests(
    serve: Serve, make_language_model: Callable[..., LanguageModel]
) -> None:
    model = make_language_model(chat_template=template("qwen2.5"), words=CALLS, max_position_embeddings=4096)
    bodies = [
        asking("plain", max_tokens=12),
        asking("paint it", tools=[PAINT], tool_choice="required"),
        asking("free", tools=[PAINT], max_tokens=10),
        asking("form", response_format=FORMAT),
        asking("two", n=2, temperature=1.0, seed=5, max_tokens=9),
        asking("told", logprobs=True, top_logprobs=2, max_tokens=5),
    ]

    def what_matters(body: dict[str, Any]) -> list[Any]:
        answers = []
        for choice in body["choices"]:
            message = choice["message"]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            tokens = [entry["token"] for entry in choice["logprobs"].get("content") or ()]
            answers.append((message["content"], calls, choice["finish_reason"], tokens))
        records = body["semgrad_guard"] if isinstance(body["semgrad_guard"], list) else [body["semgrad_guard"]]
        return [answers, body["usage"], [round(record["uncertainty"], 9) for record in records]]

    async with serve(ALL, model=model, options=Options(max_tokens=120)) as client:
        alone = [what_matters((await client.post(CHAT, json=body)).json()) for body in bodies]
        streams = [client.post(CHAT, json={**body, "stream": True}) for body in (bodies[0], bodies[3])]
        found = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies), *streams)
        assert client.service.models["tiny"].scheduler.batching == "steps"
    for one, its in zip(found, alone, strict=False):
        assert what_matters(one.json()) == its
    called, formed = found[1].json()["choices"][0], found[3].json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    assert json.loads(formed["message"]["content"])["colour"] in ("red", "green")
    for response, its in zip(found[len(bodies) :], (alone[0], alone[3]), strict=True):
        pieces = [
            choice["delta"].get("content") or "" for event in events(response.text) for choice in event["choices"]
        ]
        assert "".join(pieces) == its[0][0][0]
