"""Requests that share a model: each gets the answer of a single request, whichever other comes, goes or fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from semgrad_guard import LanguageModel
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.errors import (
    DeadlineExceededError,
    InputError,
    PromptTooLongError,
)
from semgrad_guard.guard import Draft
from semgrad_guard.server.answers import Answer
from semgrad_guard.server.scheduler import LiveAnswers
from semgrad_guard.server.writing import AnswerRequest
from tests.steps import LIMIT

from .batches import (
    CHAT,
    MIXED,
    Listener,
    Options,
    Start,
    all_at_once,
    answered,
    fails,
    of_kind,
    request,
    require_alone,
)
from .conftest import ALL, Serve, asking, events, watched


@pytest.mark.parametrize("together", [True, False])
async def test_everybody_gets_what_a_single_request_gets(
    start: Start, language_model: LanguageModel, together: bool
) -> None:
    scheduler = start()
    for wanted, drafts in zip(MIXED, await answered(scheduler, MIXED, together=together), strict=True):
        require_alone(language_model, wanted, drafts)
    assert scheduler.batching == "steps"


async def test_a_request_joins_one_that_is_being_written(start: Start, language_model: LanguageModel) -> None:
    scheduler, loop, log = start(), asyncio.get_running_loop(), list[str]()
    came = list[asyncio.Task[Any]]()
    late = request("late", on_piece=Listener("late", log), max_tokens=6)

    def another_comes() -> None:
        loop.call_soon_threadsafe(lambda: came.append(asyncio.ensure_future(scheduler.answer(late))))
        while scheduler.depth == 0:
            threading.Event().wait(0.001)

    early = request("early", on_piece=Listener("early", log, at=2, then=another_comes), max_tokens=30)
    require_alone(language_model, early, await scheduler.answer(early))
    require_alone(language_model, late, await came[0])
    assert log.index("late") < len(log) - 1 - log[::-1].index("early"), "they were written side by side"
    assert log[:2] == ["early", "early"]


async def test_streams_beside_plain_answers(start: Start, language_model: LanguageModel) -> None:
    scheduler = start()
    requests = [request(f"q{n}", max_tokens=9 + n, stop=("b",) if n % 2 else ()) for n in range(4)]

    async def streamed(wanted: AnswerRequest) -> tuple[list[Any], Draft[Answer]]:
        live, pieces = LiveAnswers(scheduler, wanted), list[Any]()
        while (more := await live.next().begin()) is not None:
            pieces += more
        return pieces, await live.draft().begin()

    async with all_at_once(scheduler, 8):
        streams = [asyncio.ensure_future(streamed(wanted)) for wanted in requests]
        plain = [asyncio.ensure_future(scheduler.answer(wanted)) for wanted in requests]
    for wanted, stream, task in zip(requests, streams, plain, strict=True):
        pieces, draft = await stream
        require_alone(language_model, wanted, [draft])
        require_alone(language_model, wanted, await task)
        assert "".join(pieces) == draft.answer.text
        assert all(pieces)
        assert len(pieces) > 1 or len(draft.answer.text) < 2


async def test_one_that_is_cancelled_leaves_the_others(start: Start, language_model: LanguageModel) -> None:
    scheduler, loop, log = start(), asyncio.get_running_loop(), list[str]()
    others = [request(f"q{n}", max_tokens=20) for n in range(2)]
    tasks, notified = list[asyncio.Task[Any]](), threading.Event()

    def leaves() -> None:  # in the model's thread, which resumes once the request has been notified
        loop.call_soon_threadsafe(tasks[0].cancel)
        assert notified.wait(LIMIT)

    listener = Listener("gone", log, at=3, then=leaves)
    _, ended = watched(scheduler)
    async with all_at_once(scheduler, 3):
        tasks += [asyncio.ensure_future(scheduler.answer(request("gone", max_tokens=150, on_piece=listener)))]
        tasks[0].add_done_callback(lambda _: notified.set())
        tasks += [asyncio.ensure_future(scheduler.answer(other)) for other in others]
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    for wanted, task in zip(others, tasks[1:], strict=True):
        require_alone(language_model, wanted, await task)
    while len(ended) < 4:
        await asyncio.sleep(0.001)
    assert sorted(ended) == ["AnswerCancelledError", *["NoneType"] * 3]
    assert len(listener.pieces) == 3, "the model did not continue without a reader"


async def test_one_whose_time_is_over_leaves_the_others(start: Start, language_model: LanguageModel) -> None:
    scheduler, log = start(), list[str]()
    stop = Stop(10 * LIMIT)

    def time_passes() -> None:
        stop._deadline = 0.0

    wanted = request("slow", max_tokens=150, on_piece=Listener("slow", log, at=2, then=time_passes))
    other = request("other", max_tokens=20)
    async with all_at_once(scheduler, 2):
        with stopping(stop):
            late = asyncio.ensure_future(scheduler.answer(wanted))
        fine = asyncio.ensure_future(scheduler.answer(other))
    require_alone(language_model, other, await fine)
    with pytest.raises(DeadlineExceededError):
        await late
    assert len(log) < 10


FAILING: list[tuple[AnswerRequest, type[Exception], str]] = [
    (request("a", form=AnswerForm(schema={"$ref": "#/nowhere"})), InputError, "schema"),
    (request("b", prompt_limit=3), PromptTooLongError, "takes 3"),
    (request("c" * 400), PromptTooLongError, "context window"),
    (request("d", on_piece=Listener("d", [], at=1, then=fails)), RuntimeError, "gone"),
    # The last letter may begin the stop string, and is held back until the end.
    (request("e", form=AnswerForm(schema={"const": "abcd"}), stop=('"x',),
             on_piece=Listener("e", [], at=5, then=fails)), RuntimeError, "gone"),
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


@pytest.mark.parametrize("kind", ["steps", "equal_lengths", "none"])
async def test_every_kind_of_batching(start: Start, serve: Serve, kind: str) -> None:
    model = of_kind(kind)
    alike = [request("hello"), request("a longer question"), request("x", count=2)]
    requests = [*alike, request("late", max_tokens=3), request("y", temperature=1.0, seed=3, count=2)]
    scheduler, rows = start(model), list[int]()
    await scheduler.work(lambda: None)  # the model was looked at: those passes are no requests
    layer: Any = model._scorer.twin.layers[0]
    model.generate("Hi", Options(max_tokens=1)).evidence.gradients()  # the self-check is no request
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(args[0])), with_kwargs=True)
    found = await answered(scheduler, requests)
    hook.remove()
    assert max(rows) == {"steps": 7, "equal_lengths": 4, "none": 1}[kind]
    for wanted, drafts in zip(requests, found, strict=True):
        require_alone(model, wanted, drafts)
    async with serve(ALL, model=model, scheduler=scheduler) as client:
        [described] = (await client.get("/v1/models")).json()["data"]
        assert described["semgrad_guard"]["batching"] == kind
        pieces = events((await client.post(CHAT, json=asking("hello", stream=True))).text)
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == found[0][0].answer.text


@pytest.mark.parametrize(("kind", "most"), [("steps", 2), ("equal_lengths", 2), ("steps", 1)])
async def test_a_limit_of_rows_holds_in_every_kind_of_batching(start: Start, kind: str, most: int) -> None:
    model, rows = of_kind(kind), list[int]()
    model.max_batch = most
    scheduler = start(model)
    await scheduler.work(lambda: None)
    requests = [request("hello"), request("a longer question"), request("x", count=3), request("late", max_tokens=3)]
    layer: Any = model._scorer.twin.layers[0]
    model.generate("Hi", Options(max_tokens=1)).evidence.gradients()  # the self-check is no request
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(args[0])), with_kwargs=True)
    found = await answered(scheduler, requests)
    hook.remove()
    assert max(rows) <= most
    assert scheduler.batching == kind
    for wanted, drafts in zip(requests, found, strict=True):
        require_alone(model, wanted, drafts)
