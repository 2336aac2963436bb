"""One thread owns a model: callers share its steps, none waits for a stranger, and an error is one caller's."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy, Verdict
from semgrad_guard.engine.answers import batch, running, worker
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.interruption import Stop, Ticket, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import (
    AnswerCancelledError,
    DeadlineExceededError,
    InputError,
    PromptTooLongError,
)
from semgrad_guard.estimators import Sampling, SemanticEntropy
from tests.fixed_model import TEXT
from tests.steps import LIMIT, Steps, until
from tests.whole_runs import whole_run

from .snapshots import unchanged
from .worker_calls import busy, submitted

Make = Callable[..., LanguageModel]
QUESTIONS = ("hello", "a longer question", "x", "What is tea?")


def scored(generation: Generation, objective: Objective | None = None) -> float | None:
    found = generation.evidence.gradients(objective)
    return None if found is None else found.scores.semgrad


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "semgrad-guard-worker"]


def test_callers_with_several_objectives_share_one_thread_and_its_steps(make_language_model: Make) -> None:
    before, model = threads(), make_language_model(seed=2)
    objectives = [Objective(), Objective("official"), Objective(gradients=False), Objective()]
    options = GenerationOptions(max_tokens=8)
    alone = [whole_run(model, text, options) for text in QUESTIONS]
    free, log = busy(model), list[str]()
    tickets = [
        submitted(model, text, objective=objective, on_piece=lambda _, text=text: log.append(text))
        for text, objective in zip(QUESTIONS, objectives, strict=True)
    ]
    assert len(set(threads()) - set(before)) == 1
    free.set()
    for ticket, single, objective in zip(tickets, alone, objectives, strict=True):
        found = ticket.outcome()
        assert (found.text, found.response_ids) == (single.text, single.response_ids)
        if objective.gradients:
            assert scored(found, objective) == pytest.approx(scored(single, objective), rel=2e-5)
    assert len(set(log[: len(QUESTIONS)])) > 1, "they were written side by side"


def test_a_caller_that_is_stopped_leaves_the_model_as_it_was(make_language_model: Make) -> None:
    """It leaves at once, and the model's thread at the next layer."""
    model = make_language_model(seed=2)
    model.generate("hello", GenerationOptions(max_tokens=2)).evidence.gradients()
    steps = Steps(model)
    for at in (1, 2, 3):
        stop = Stop()
        steps.at(steps.count + at, stop.cancel)
        with unchanged(model._model):
            with stopping(stop), pytest.raises(AnswerCancelledError):
                model.generate_batch(QUESTIONS, GenerationOptions(max_tokens=40))
            until(lambda: not model.worker._running)


def test_a_request_that_cannot_be_answered_is_refused_at_once(language_model: LanguageModel) -> None:
    with pytest.raises(PromptTooLongError):
        submitted(language_model, "c" * 400)
    with pytest.raises(InputError, match="schema"):
        submitted(language_model, "hello", grammar='start: %json {"$ref": "#/nowhere"}')


def test_a_cancelled_or_late_caller_does_not_wait_for_its_turn(make_language_model: Make) -> None:
    """Three that wait behind answers which fill the batch: one is cancelled, one late, and one is answered."""
    model = make_language_model(seed=2)
    model.max_batch, stop = 2, Stop(10 * LIMIT)
    reached, go_on = threading.Event(), threading.Event()
    steps = Steps(model)
    steps.at(6, lambda: (reached.set(), go_on.wait(LIMIT)))
    written = [submitted(model, text, max_tokens=40) for text in ("one", "two")]
    assert reached.wait(LIMIT)
    cancelled = submitted(model, "cancelled")
    with stopping(stop):
        late = submitted(model, "late")
    waits = submitted(model, "waits")
    assert cancelled.cancel()
    assert cancelled.cancelled()
    stop._deadline = 0.0
    go_on.set()
    with pytest.raises(DeadlineExceededError):
        late.result(LIMIT)
    assert not any(ticket.done() for ticket in written), "it did not wait for them"
    assert waits.result(LIMIT).text == whole_run(model, "waits", GenerationOptions(max_tokens=8)).text


async def test_a_cancelled_task_cancels_its_request(make_language_model: Make) -> None:
    model = make_language_model(seed=2)
    free = busy(model)
    ticket = submitted(model, "hello")
    task = asyncio.ensure_future(asyncio.wait_for(asyncio.wrap_future(ticket), LIMIT))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    free.set()
    assert ticket.cancelled()


def test_a_caller_that_has_the_models_turn_is_answered_within_it(language_model: LanguageModel) -> None:
    expected = whole_run(language_model, "hello", GenerationOptions(max_tokens=8)).text
    with language_model.turn:
        assert submitted(language_model, "hello").result(LIMIT).text == expected
    nested = language_model.worker.run(lambda: submitted(language_model, "hello").result(LIMIT).text)
    assert nested.result(LIMIT) == expected


def test_weights_are_freed_with_their_last_user(make_language_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle thread holds none of them, and ends some time later; the next request begins another one."""
    monkeypatch.setattr(worker, "IDLE", 0.5)
    before, model = threads(), make_language_model(seed=2)
    expected = submitted(model, "hello").outcome().text
    until(lambda: set(threads()) <= set(before))
    assert submitted(model, "hello").outcome().text == expected
    ghosts = [weakref.ref(model), weakref.ref(model._model), weakref.ref(model.worker), weakref.ref(model.scorer)]
    assert submitted(model, "hello").outcome().completion_tokens > 1
    [idle] = [thread for thread in threads() if thread not in before]
    del model
    until(lambda: gc.collect() is not None and not any(ghost() for ghost in ghosts))
    idle.join(LIMIT)
    assert not idle.is_alive()


@pytest.mark.parametrize("how", ["coroutines", "threads", "streams"])
def test_concurrent_guards_share_steps(make_language_model: Make, how: str) -> None:
    """Six questions take little more passes than one; their verdicts are those of single calls."""
    model = make_language_model(seed=2)
    guard = Guard(
        model, Policy(threshold=1e9, on_cut="score"), options=GenerationOptions(max_tokens=12, temperature=1.0, seed=4)
    )
    questions = [f"question {number}" for number in range(6)]
    alone = [guard(question) for question in questions]
    free, steps = busy(model), Steps(model)

    async def together() -> list[Verdict]:
        tasks = [asyncio.ensure_future(ask(question)) for question in questions]
        while model.worker.depth < len(questions):
            await asyncio.sleep(0.001)
        free.set()
        return await asyncio.gather(*tasks)

    async def ask(question: str) -> Verdict:
        if how == "coroutines":
            return await guard.acall(question)
        if how == "threads":
            return await asyncio.to_thread(guard, question)
        stream = guard.astream(question)
        pieces = [piece async for piece in stream]
        verdict = await stream.verdict()
        assert "".join(pieces) == verdict.text
        return verdict

    found = asyncio.run(together())
    assert steps.in_all() <= (60 if how == "streams" else 30)  # each stream is scored in its reader's thread
    for one, single in zip(found, alone, strict=True):
        assert (one.text, one.action) == (single.text, single.action)
        assert one.uncertainty == pytest.approx(single.uncertainty, rel=2e-5)


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("how", ["batch", "abatch"])
def test_a_batch_shares_its_steps_with_a_stranger(make_language_model: Make, how: str, rows: int | None) -> None:
    """Its caller decides how many are written at once, up to `max_batch`; another caller waits for none of them."""
    model = make_language_model(seed=2)
    guard = Guard(model, Policy(threshold=1e9, on_cut="score"), options=GenerationOptions(max_tokens=40))
    questions = [f"question {number}" for number in range(12)]
    alone = [guard(question) for question in questions]
    model.max_batch = rows
    steps, reached, go_on = Steps(model), threading.Event(), threading.Event()
    steps.at(6, lambda: (reached.set(), go_on.wait(LIMIT)))
    with ThreadPoolExecutor() as threads_of_callers:
        batched = threads_of_callers.submit(
            lambda: guard.batch(questions) if how == "batch" else asyncio.run(guard.abatch(questions))
        )
        assert reached.wait(LIMIT)
        written = sum(len(some._batch.rows) for some in model.worker._running.values())
        assert written > batch.ROWS if rows is None else written <= rows  # some have ended already
        stranger, still_writing = submitted(model, "hello", max_tokens=3), list[bool]()
        stranger.add_done_callback(lambda _: still_writing.append(not batched.done()))  # before the next step
        go_on.set()
        assert stranger.result(LIMIT).text
        found = batched.result(LIMIT)
        assert still_writing == [True]
    for one, single in zip(found, alone, strict=True):
        assert (one.text, one.action) == (single.text, single.action)
        assert one.uncertainty == pytest.approx(single.uncertainty, rel=2e-5)
    assert rows or steps.in_all() <= 60, "40 for the longest answer, and those of the scores"


def test_a_batch_of_which_one_cannot_be_answered_writes_none(make_language_model: Make) -> None:
    model = make_language_model(seed=2)
    guard, steps = Guard(model, Policy(threshold=1e9, on_cut="score")), Steps(model)
    with pytest.raises(PromptTooLongError):
        guard.batch(["hello", "c" * 400])
    assert steps.in_all() == 0


class Passes:
    """The number of tokens that each row of each pass reads, from now on."""

    def __init__(self, model: LanguageModel) -> None:
        self.widths = list[int]()
        copy: Any = model.scorer.twin.model
        embedding = copy.get_input_embeddings()
        self._handle = embedding.register_forward_pre_hook(lambda _, given: self.widths.append(given[0].shape[1]))

    def end(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize("objective", [Objective(), Objective(gradients=False), Objective(last_tokens=9)], ids=str)
def test_a_long_prompt_is_read_between_the_steps_of_others(make_language_model: Make, objective: Objective) -> None:
    model = make_language_model(seed=2, max_position_embeddings=4096)
    text, options = "a long question, " * 60, GenerationOptions(max_tokens=6, temperature=1.0, seed=3)
    alone = whole_run(model, text, options)
    expected = scored(alone, objective) if objective.gradients else None
    submitted(model, "hello").outcome()
    passes, log = Passes(model), list[str]()
    other = submitted(model, "hello", max_tokens=40, temperature=1.0, seed=6, on_piece=lambda _: log.append("other"))
    until(lambda: len(log) > 2)
    ticket = submitted(model, text, objective=objective, max_tokens=6, temperature=1.0, seed=3,
                       on_piece=lambda _: log.append("long"))  # fmt: skip
    found = ticket.result(LIMIT)
    other.result(LIMIT)
    passes.end()
    assert max(passes.widths) <= running._READ
    assert (found.text, found.response_ids) == (alone.text, alone.response_ids)
    if expected is not None:
        assert scored(found, objective) == pytest.approx(expected, rel=2e-5)


def test_samples_are_drawn_between_the_steps_of_others(make_language_model: Make) -> None:
    """They are rows of the same batch, drawn while their own answer is written; the score is that of a single run."""
    model = make_language_model(seed=2)
    drawing = SemanticEntropy(plan=Sampling(count=10, max_tokens=40, seed=1))
    options = GenerationOptions(max_tokens=12)
    alone = drawing(whole_run(model, "What is tea?", options).evidence)
    assert alone.uncertainty
    steps, passes = Steps(model), list[int]()
    stream = submitted(model, "hello", on_piece=lambda _: passes.append(steps.count), max_tokens=60,
                       temperature=1.0, seed=6)  # fmt: skip
    until(lambda: passes)
    verdict = Guard(model, Policy(threshold=1e9, on_cut="score"), estimator=drawing, options=options)("What is tea?")
    ended = steps.count
    stream.outcome()
    apart = [second - first for first, second in itertools.pairwise(passes) if first <= ended]
    assert len(apart) >= 5, "the stream continues while the samples are drawn"
    assert max(apart) <= 20, "half a character is held back for some steps, and no sample is as short"
    assert verdict.uncertainty == pytest.approx(alone.uncertainty, rel=2e-5)
    assert ended <= passes[0] + 40 + 12, "the samples share the steps of their own answer"


def test_a_long_prompt_whose_caller_leaves_is_read_no_further(make_language_model: Make) -> None:
    model = make_language_model(seed=2, max_position_embeddings=4096)
    submitted(model, "hello").outcome()
    free, passes = busy(model), Passes(model)
    ticket = submitted(model, "a long question, " * 60)
    long = submitted(model, "another question, " * 60)
    other = submitted(model, "hello")
    copy: Any = model.scorer.twin.model

    def leave(*_: object) -> None:
        ticket.cancel()

    copy.get_input_embeddings().register_forward_pre_hook(leave)
    free.set()
    with pytest.raises(AnswerCancelledError):
        ticket.result(LIMIT)
    assert sum(width > 100 for width in passes.widths) <= 2
    assert other.result(LIMIT).text
    assert long.result(LIMIT).text
    passes.end()


def test_rows_that_see_each_other_after_a_change_are_written_one_by_one(make_language_model: Make) -> None:
    model = make_language_model(seed=2)
    submitted(model, "hello").outcome()
    layer: Any = model._model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda *call: call[2] + 0.3 * call[2].mean(0, keepdim=True))
    expected = [whole_run(model, text, GenerationOptions(max_tokens=8)).text for text in QUESTIONS]
    free = busy(model)
    tickets = [submitted(model, text) for text in QUESTIONS]
    free.set()
    assert [ticket.result(LIMIT).text for ticket in tickets] == expected
    assert not model.joins


Make = Callable[..., LanguageModel]


def test_an_error_while_requests_are_put_together_is_one_callers(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_language_model(seed=2)
    has_room = running.RunningRequests.has_room

    def with_room_for_one(self: running.RunningRequests, jobs: Any, *, beside: int) -> bool:
        if len(jobs) == 2:
            raise RuntimeError("the model cannot be looked at")
        return has_room(self, jobs, beside=beside)

    monkeypatch.setattr(running.RunningRequests, "has_room", with_room_for_one)
    free = busy(model)
    tickets = [submitted(model, text) for text in ("one", "two")]
    free.set()
    assert tickets[0].result(LIMIT).text
    with pytest.raises(RuntimeError, match="cannot be looked at"):
        tickets[1].result(LIMIT)
    assert submitted(model, "three").result(LIMIT).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", [name for name in vars(RunningBatch) if not name.startswith("_")])
def test_an_error_anywhere_in_a_batch_leaves_no_caller_waiting(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From its n-th call on, a method raises an error: every caller gets an answer or an error, and later ones too."""
    model, method = make_language_model(seed=2), vars(RunningBatch)[name]
    sentences: dict[str, Any] = {"grammar": f'start: "{TEXT}"', "max_tokens": 64}
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("x" * 150, {}),  # is read in pieces
        ("hello", {"draws": (Sampling(count=2, max_tokens=4),), "on_piece": lambda _: None}),
        ("What is tea?", {"on_sentences": lambda _: True, **sentences}),
        ("What is milk?", {"on_sentences": lambda _: False, **sentences}),
    ]
    monkeypatch.setattr(running, "_READ", 100)
    for first in (1, 3):
        calls = itertools.count(1)

        def failing(*args: Any, first: int = first, calls: Any = calls, **options: Any) -> Any:
            if next(calls) >= first:
                raise RuntimeError("no such luck")
            return (method.fget if isinstance(method, property) else method)(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(RunningBatch, name, property(failing) if isinstance(method, property) else failing)
            free = busy(model)
            tickets = [submitted(model, text, **options) for text, options in wanted]
            free.set()
            for ticket in tickets:
                assert ticket.exception(LIMIT) is None or "no such luck" in str(ticket.exception())
        until(lambda: submitted(model, "later").exception(LIMIT) is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_follows_the_end_of_the_thread_is_answered_by_another(
    make_language_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends by an error, whose first caller submits the request again from a thread of its own."""
    model, again = make_language_model(seed=2), list[Ticket[Generation]]()

    def submit_again(_: Any) -> None:
        thread = threading.Thread(target=lambda: again.append(submitted(model, "again")))
        thread.start()
        thread.join(LIMIT)

    free, errors, following = busy(model), iter([ZeroDivisionError("once")]), model.worker._begin_next

    def fails_once() -> Any:
        for error in errors:
            raise error
        return following()

    monkeypatch.setattr(model.worker, "_begin_next", fails_once)
    ticket = submitted(model, "first")
    ticket.add_done_callback(submit_again)
    free.set()
    with pytest.raises(ZeroDivisionError):
        ticket.result(LIMIT)
    until(lambda: bool(again))
    assert again[0].result(LIMIT).text
