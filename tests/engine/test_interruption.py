"""Deadlines and cancellations wherever a model works, and the end of its process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.interruption import InterruptibleLock, Stop, current_stop, stopping
from semgrad_guard.engine.scores.gradient_scores import last_states
from semgrad_guard.engine.scores.tape import FRUGAL
from semgrad_guard.errors import AnswerCancelledError, DeadlineExceededError, InputError
from semgrad_guard.estimators.text_pairs import Entailment
from tests.leaks import smallest_growth, tensors_alive
from tests.pairwise import every
from tests.steps import LIMIT, Steps, until_stopped
from tests.warm_python import WarmPython

from .snapshots import unchanged
from .tiny_models import build
from .tiny_pair_models import MNLI
from .worker_calls import Streamed

Make = Callable[..., LanguageModel]

LONG = GenerationOptions(max_tokens=200, temperature=1.0, seed=3)


class Countdown(Stop):
    """Counts the checks and cancels itself at the one of this number."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.checks = at, 0

    def check(self) -> None:
        self.checks += 1
        if self.at is not None and self.checks > self.at:
            self.cancel()
        super().check()


def copy_of(model: LanguageModel) -> Any:
    return model.scorer.twin.model


def observed(model: LanguageModel, options: GenerationOptions) -> tuple[Any, ...]:
    generation = model.generate("What is tea?", options)
    return generation.text, generation.response_ids, generation.evidence.gradients()


def scores_of(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*answer[:2], None if answer[2] is None else answer[2].scores)


def generated(model: LanguageModel) -> object:
    return scores_of(observed(model, GenerationOptions(max_tokens=3)))


def sampled_until_a_stop_string(model: LanguageModel) -> object:
    return scores_of(observed(model, GenerationOptions(max_tokens=3, temperature=1.0, seed=3, stop=("zq", "never"))))


def in_a_grammar(model: LanguageModel) -> object:
    return scores_of(observed(model, GenerationOptions(max_tokens=4, grammar='start: "ye" | "no"')))


def a_batch(model: LanguageModel) -> object:
    answers = model.generate_batch(["What is tea?", "And?"], GenerationOptions(max_tokens=3))
    found = [answer.evidence.gradients() for answer in answers]
    return [(a.text, f and f.scores) for a, f in zip(answers, found, strict=True)]


def from_elsewhere(model: LanguageModel) -> object:
    return model.score("What is tea?", "A drink.")


def in_sentences(model: LanguageModel) -> object:
    return model.segments("What is tea?", "A drink, hot. Or cold.")


def with_little_memory(model: LanguageModel) -> object:
    model.memory = FRUGAL
    return generated(model)


def samples(model: LanguageModel) -> object:
    evidence = model.evidence("What is tea?", "A drink.")
    return evidence.samples(Sampling(count=2, max_tokens=3))


def states(model: LanguageModel) -> object:
    return last_states(model.scorer, [model.render("What is tea?")], 3).tolist()


SCENARIOS: Sequence[Callable[[LanguageModel], object]] = (
    generated,
    sampled_until_a_stop_string,
    in_a_grammar,
    a_batch,
    from_elsewhere,
    in_sentences,
    with_little_memory,
    samples,
    states,
)


def checks_of(scenario: Callable[[LanguageModel], object], model: LanguageModel) -> int:
    """How often a run in this thread asks whether to continue."""
    count = Countdown()
    with model.turn, stopping(count):
        scenario(model)
    return count.checks


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("first", every(10, range(10)))
def test_stopped_at_any_check_the_next_answer_is_a_fresh_models(
    make_language_model: Make, scenario: Callable[[LanguageModel], object], first: int
) -> None:
    """At every tenth check from the first one, and in `make check-heavy` at the others."""
    model, expected = make_settled(make_language_model, scenario), scenario(make_language_model())
    checks = checks_of(scenario, model)
    assert checks > 5
    for at in range(first, checks, 10):
        untouched = unchanged(model._model), unchanged(copy_of(model))
        with model.turn, untouched[0], untouched[1], stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
            scenario(model)
        assert scenario(model) == expected, at


def make_settled(make: Make, scenario: Callable[[LanguageModel], object]) -> LanguageModel:
    """A model whose self-check is done, and whose scores in the scenario were verified."""
    model = make()
    model.scorer.exactness()
    scenario(model)
    checks_of(scenario, model)  # in this thread a batch is scored in other groups, which are verified as well
    return model


def test_a_backward_pass_is_interrupted_between_its_layers(make_language_model: Make) -> None:
    """Autograd may run it in a thread of its own, which knows no context variable."""

    class InBackward(Stop):
        passed = 0

        def check(self) -> None:
            self.passed += torch._C._current_graph_task_id() >= 0
            if self.passed == 2:
                self.cancel()
            super().check()

    model, stop = make_language_model(num_hidden_layers=9), InBackward()  # a graph over four layers
    generation = model.generate("What is tea?", GenerationOptions(max_tokens=3))
    with stopping(stop), pytest.raises(AnswerCancelledError):
        generation.evidence.gradients()
    assert stop.passed == 2


@pytest.mark.parametrize("at", [0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23])
def test_a_self_check_that_was_stopped_is_made_again(make_language_model: Make, at: int) -> None:
    """An interruption proves nothing about a tier: none is given up for it."""
    model = make_language_model()
    with stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
        model.scorer.exactness()
    assert model.scorer.exactness().way == "rows"


@pytest.mark.parametrize("name", ["mamba", "jamba", "falcon-h1", "gpt2"])
def test_other_architectures_stop_too(name: str, tokenizer: Any) -> None:
    model = LanguageModel.from_transformers(build(name, vocab_size=258, bos_token_id=1, eos_token_id=257), tokenizer)
    expected = generated(model)
    for at in range(0, checks_of(generated, model), 3):
        with model.turn, stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
            generated(model)
    assert generated(model) == expected


def test_an_interrupted_scoring_can_be_taken_up_again(make_language_model: Make) -> None:
    model, options = make_language_model(), GenerationOptions(max_tokens=6)
    expected = model.generate("What is tea?", options).evidence.gradients()
    generation, count = model.generate("What is tea?", options), Countdown()
    with stopping(count):
        model.generate("What is tea?", options).evidence.gradients()
    for at in range(1, 9):
        with stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
            generation.evidence.gradients()
    found = generation.evidence.gradients()
    assert found is not None
    assert expected is not None
    assert found.scores == expected.scores
    assert found.scores.tier == "replay"


@pytest.mark.parametrize("at", [3, 12, 20])
def test_nothing_of_an_interrupted_call_stays_in_memory(make_language_model: Make, at: int) -> None:
    model = make_language_model()
    generated(model)
    counts = list[int]()
    for _ in range(4):
        with stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
            generated(model)
        counts.append(tensors_alive())
    assert smallest_growth(counts) <= 0, counts


def test_a_deadline_holds_for_generating_and_scoring_together(make_language_model: Make) -> None:
    model, stop = make_language_model(), Stop(0.05)
    generation = model.generate("What is tea?", GenerationOptions(max_tokens=3))
    time.sleep(0.06)
    for work in (generation.evidence.gradients, lambda: model.score("a", "b"), lambda: model.generate("c")):
        with stopping(stop), pytest.raises(DeadlineExceededError, match=r"0\.05 s.*max_tokens"):
            work()


def test_who_waits_for_a_busy_model_heeds_its_stop(make_language_model: Make) -> None:
    model, busy, done = make_language_model(), threading.Event(), threading.Event()

    def occupy() -> None:
        with model.scorer.lock:
            busy.set()
            done.wait()

    holder = threading.Thread(target=occupy)
    holder.start()
    busy.wait()
    with stopping(Stop(0.05)), pytest.raises(DeadlineExceededError):
        model.generate("What is tea?")
    stop = Stop()
    threading.Timer(0.05, stop.cancel).start()
    with stopping(stop), pytest.raises(AnswerCancelledError):
        model.score("What is tea?", "A drink.")
    done.set()
    holder.join()
    assert generated(model) == generated(make_language_model())


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_left_stops_its_model(make_language_model: Make, how: str) -> None:
    model = make_language_model()
    steps = Steps(model)
    steps.at(100, until_stopped)
    stream = Streamed(model, "What is tea?", LONG)
    assert stream.next()
    (ticket,) = stream.tickets
    if how == "closed":
        stream.close()
    del stream
    assert isinstance(ticket.exception(LIMIT), AnswerCancelledError)
    assert 0 < steps.in_all() <= 100
    assert generated(model) == generated(make_language_model())


def test_a_pair_model_stops_and_judges_alike_afterwards(make_pair_model: Callable[..., Path]) -> None:
    folder = make_pair_model(labels=MNLI)
    pairs = [(f"tea {i}", "a drink " * (i + 1)) for i in range(6)]

    def fresh() -> Entailment:
        model = Entailment.from_pretrained(str(folder))
        model.together = 2
        return model

    expected, count = fresh().probabilities(pairs), Countdown()
    with stopping(count):
        fresh().probabilities(pairs)
    assert count.checks > 6
    model = fresh()
    for at in range(count.checks):
        with stopping(Countdown(at)), pytest.raises(AnswerCancelledError):
            model.probabilities(pairs)
    assert model.probabilities(pairs) == expected


class TestStop:
    """The object itself."""

    def test_an_outer_stop_counts_inside_an_inner_one(self) -> None:
        outer, inner = Stop(), Stop(60)
        with stopping(outer), stopping(inner):
            current_stop().check()
            assert 0 < (current_stop().remaining or 0) <= 60
            outer.cancel()
            assert current_stop().remaining == 0
            with pytest.raises(AnswerCancelledError):
                current_stop().check()
        assert not current_stop()
        assert current_stop().remaining is None
        current_stop().check()

    @pytest.mark.parametrize("timeout", [0, -1, float("nan")])
    def test_a_timeout_must_leave_time(self, timeout: float) -> None:
        with pytest.raises(InputError, match="above 0"):
            Stop(timeout)

    def test_the_lock_can_be_taken_again_by_its_holder(self) -> None:
        lock = InterruptibleLock()
        with stopping(Stop(60)), lock, lock:
            pass
        with pytest.raises(RuntimeError):
            lock.__exit__()


SETTING = """
import asyncio, atexit, ctypes, os, threading
ends, pause, wrote = [], 0, threading.Event()
atexit.register(lambda: (wrote.wait(pause), print(*ends)))  # before ours, and so called after it

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.guard import off_loop
from tests.random_llama import byte_tokenizer, random_llama

sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096, "eos_token_id": None}
model = LanguageModel.from_transformers(random_llama(**sizes), byte_tokenizer(), name="random")
begun = threading.Event()
model._model.register_forward_hook(lambda *_: begun.set())
LONG = GenerationOptions(max_tokens=3000, temperature=1.0, seed=3)

def left(coroutine):  # a reference is lost on purpose: asyncio would complain of a task that is destroyed
    task = asyncio.ensure_future(coroutine)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))

def write():
    ends.append("nothing")
    try:
        ends[-1] = model.generate("What is tea?", LONG).finish_reason
    except BaseException as error:
        ends[-1] = type(error).__name__
        raise
    finally:
        wrote.set()
"""

STREAM = """
from tests.engine.worker_calls import Streamed
stream = Streamed(model, "What is tea?", LONG)
stream.next()
"""

IN_A_LOOP = """
async def main():
    left({begin})
    while not {event}.is_set():
        await asyncio.sleep(0.001)
    loop.stop()
loop = asyncio.new_event_loop()
task = loop.create_task(main())
loop.run_forever()
"""

OFF_LOOP = "pause = 30" + IN_A_LOOP.format(begin="off_loop(write)", event="begun")

SCHEDULER = """
from semgrad_guard.guard import Answerer
from semgrad_guard.server.scheduler import AnswerRequest, Scheduler
scheduler = Scheduler(Answerer(model, HybridGrad()))
"""

SERVED = (
    SCHEDULER
    + """
heard = threading.Event()
request = AnswerRequest(conversation=(Message("user", "What is tea?"),), options=LONG, on_piece=lambda _: heard.set())
"""
    + IN_A_LOOP.format(begin="scheduler.answer(request)", event="heard")
)

SUBMITTED = """
from semgrad_guard.engine.answers.running import Request
def submit(options=LONG, heard=None):
    return model.submit(Request(prompt=model.render("What is tea?"), options=(options,), on_piece=heard,
                                finish=lambda found: found[0].completion_tokens))
heard = threading.Event()
ticket = submit(heard=lambda _: heard.set())
heard.wait()
"""

IN_A_CHILD = """
child = os.fork()
if not child:  # thread and queue are the parent's
    raise SystemExit(submit(GenerationOptions(max_tokens=5)).result())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

RAISES = "raise SystemExit(3)"

FORKED = """
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise SystemExit(4)
"""

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        pytest.param(STREAM, 0, "", marks=pytest.mark.heavy),
        (STREAM + RAISES, 3, ""),
        pytest.param(STREAM + FORKED, 4, "", marks=FORKS),
        (OFF_LOOP, 0, "AnswerCancelledError"),
        (SCHEDULER, 0, ""),
        (SERVED, 0, ""),
        pytest.param(SUBMITTED, 0, "", marks=pytest.mark.heavy),
        pytest.param(SUBMITTED + IN_A_CHILD, 5, "", marks=FORKS),
    ],
    ids=(
        "stream",
        "raises",
        "forked",
        "off_loop",
        "self_check",
        "served",
        "submitted",
        "forked_submitted",
    ),
)
def test_a_process_ends_with_its_own_code(
    program: str, code: int, printed: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    done = warm_python.run(["-c", SETTING + program], folder=tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    assert printed in done.stdout
