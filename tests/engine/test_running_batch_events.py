"""A running batch while listeners fail, stops come, models change and memory is short: the other answers stay right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from semgrad_guard import LanguageModel, Message
from semgrad_guard.engine.answers.writing import BatchRequest, RunningAnswer
from semgrad_guard.engine.answers.sentences import sentence_evidence
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import one_of, text_rule
from semgrad_guard.engine.replay.memory import FRUGAL, Memory
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError
from tests.pairwise import in_turn
from tests.random_llama import byte_tokenizer
from tests.whole_runs import whole_run

from .running_batches import (
    Options,
    batch_request,
    finished,
    joined,
    numbers,
    require_alike,
    require_all_alike,
    shared,
    some,
    wrapped,
    written,
)
from .snapshots import unchanged


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_somebody_who_cannot_hear_harms_nobody(at: int) -> None:
    model, pieces = shared("llama"), list[str]()
    # The last letter may begin the stop string, and is held back until the end.
    options = Options(max_tokens=4, grammar=one_of([text_rule("abcd", {})]), stop=("dx",))

    def listener(piece: str) -> None:
        if len(pieces) == at:
            raise RuntimeError("gone")
        pieces.append(piece)

    batch, other = model.running_batch(), ("you", Options(max_tokens=6))
    rows = batch.join([batch_request(model, ("Hi", options), listener), batch_request(model, other)])
    finished(batch)
    found = batch.generations(rows if at == 3 else rows[1:])[-1]
    assert str(rows[0].error) == "gone"
    assert rows[1].error is None
    require_alike(found, whole_run(model, *other))


def test_what_is_heard_makes_the_text() -> None:
    model, random = shared("llama"), Random(7)
    for _ in range(3):
        wanted, batch = some(random, 4), model.running_batch()
        pieces: list[list[str]] = [[] for _ in wanted]
        rows = batch.join([batch_request(model, item, own.append) for item, own in zip(wanted, pieces, strict=True)])
        finished(batch)
        found = batch.generations(rows)
        assert ["".join(own) for own in pieces] == [generation.text for generation in found]
        assert [own for own in pieces if "" in own] == []


def test_a_stop_ends_a_join_and_nothing_else() -> None:
    model = wrapped("llama")
    model.memory = Memory(prompts=1 << 26)  # prompts are read one after the other
    batch, wanted = model.running_batch(), ("Hi", Options(max_tokens=6))
    rows = joined(model, batch, [wanted])
    stop, read = Stop(), list[int]()

    def count(*_: Any) -> None:
        read.append(1)
        if len(read) == 2:
            stop.cancel()

    layer: Any = model._scorer.twin.layers[0]
    hook = layer.register_forward_pre_hook(count)
    with stopping(stop), pytest.raises(AnswerCancelledError):
        joined(model, batch, [("a", Options(max_tokens=6)), ("b", Options(max_tokens=6))])
    hook.remove()
    assert list(batch.rows) == rows, "the first of the two had been read"
    finished(batch)
    require_alike(batch.generations(rows)[0], whole_run(shared("llama"), *wanted))


def test_a_step_that_is_stopped_leaves_an_empty_batch_that_can_be_used() -> None:
    model, wanted, stop = shared("llama"), ("Hi", Options(max_tokens=6)), Stop()
    batch = model.running_batch()
    joined(model, batch, [wanted, ("you", Options(max_tokens=6))])
    layer: Any = model._scorer.twin.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: stop.cancel())
    with stopping(stop), pytest.raises(AnswerCancelledError):
        batch.step()
    hook.remove()
    assert batch.rows == ()
    rows = joined(model, batch, [wanted])
    finished(batch)
    require_alike(batch.generations(rows)[0], whole_run(model, *wanted))


def test_nothing_is_kept_of_answers_that_are_gone() -> None:
    model = shared("llama")
    batch = model.running_batch()
    rows = joined(model, batch, [("a", Options(max_tokens=9)), ("b" * 30, Options(max_tokens=9))])
    batch.step()
    assert batch._mask.shape[1] > 40
    batch.drop(rows[1:])
    assert batch._mask.shape[1] < 40, "the columns that only the longer prompt had are let go"
    assert batch._cache.get_seq_length() < 40
    ghosts = [weakref.ref(row) for row in rows] + [weakref.ref(row.passes[0][0]) for row in rows]
    batch.drop(rows)
    del rows
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 4
    assert batch._cache.get_seq_length() == 0
    rows = joined(model, batch, [("c", Options(max_tokens=2))])
    finished(batch)
    ghosts = [weakref.ref(rows[0]), weakref.ref(rows[0].passes[-1][0])]
    batch.generations(rows)
    del rows
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 2


@pytest.mark.parametrize("then", ["step", "join"])
def test_a_model_that_was_changed_while_it_wrote_delivers_nothing(then: str) -> None:
    model, wanted = wrapped("llama"), ("Hi", Options(max_tokens=6))
    batch = model.running_batch()
    rows = joined(model, batch, [wanted])
    batch.step()
    with torch.no_grad():
        next(iter(model._model.parameters())).mul_(1.5)
    ways = {"step": batch.step, "join": lambda: joined(model, batch, [wanted])}
    with pytest.raises(AnswerInterruptedError, match="changed while it wrote"):
        ways[then]()
    batch.drop(rows)
    rows = joined(model, batch, [wanted])
    finished(batch)
    require_alike(batch.generations(rows)[0], whole_run(model, *wanted))


def test_answers_before_and_after_a_change_are_scored_apart() -> None:
    """Those from before are scored by the model as it is, as single requests are; from nothing that it left."""
    model, wanted = wrapped("llama"), ("Hi", Options(max_tokens=3))
    batch = model.running_batch()
    rows, single = joined(model, batch, [wanted]), whole_run(model, *wanted)
    finished(batch)
    with torch.no_grad():
        model._model.get_submodule("model.layers.4.mlp.up_proj").weight.mul_(1.5)
    rows += joined(model, batch, [wanted])
    finished(batch)
    for one, alone in zip(batch.generations(rows), (single, whole_run(model, *wanted)), strict=True):
        require_alike(one, alone)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_model_and_torch_are_left_as_they_were(mode: Callable[[], Any]) -> None:
    model = wrapped("gemma2")
    model._model.train().requires_grad_(True)
    wanted = some(Random(3), 3)
    with unchanged(model._model), mode():
        found = written(model, wanted, Random(3))
        for one, (question, options) in zip(found, wanted, strict=True):
            require_alike(one, whole_run(model, question, options))
    with unchanged(model._model):
        batch = model.running_batch()
        joined(model, batch, wanted)
        batch.drop(batch.rows)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.3)
    adapted = peft.get_peft_model(shared("llama")._model.__class__(shared("llama")._model.config).float(), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model, random = LanguageModel.from_transformers(adapted.eval(), byte_tokenizer()), Random(4)
    assert model.joins
    require_all_alike(model, some(random, 4), random)
    batch = model.running_batch()
    joined(model, batch, [("Hi", Options(max_tokens=5))])
    with adapted.disable_adapter(), pytest.raises(AnswerInterruptedError):
        batch.step()


def test_what_was_left_is_observed_without_another_pass() -> None:
    model = shared("llama")
    numbers(whole_run(model, "b" * 9, Options(max_tokens=9)).evidence, Objective(gradients=False))  # is verified
    rows = joined(model, batch := model.running_batch(), [("a", Options(max_tokens=3)), ("b" * 9, Options())])
    batch.step()
    batch.step()
    batch.drop(rows[1:])
    layer: Any = model._scorer.twin.layers[0]
    passes = list[int]()
    hook = layer.register_forward_pre_hook(lambda *_: passes.append(1))
    [found] = batch.generations(rows[:1])
    assert len(numbers(found.evidence, Objective(gradients=False))) == 2 * len(found.response_ids)
    hook.remove()
    assert passes == []


@in_turn(
    memory=[FRUGAL, Memory(logits=5000, outputs=5000), Memory(logits=0)],
    objective=[Objective(), Objective(gradients=False)],
)
def test_small_budgets_change_no_score(memory: Memory, objective: Objective) -> None:
    model, random = wrapped("qwen2"), Random(5)
    wanted = [(question, Options(max_tokens=5 + n)) for n, (question, _) in enumerate(some(random, 6))]
    singles = [whole_run(model, *item, objective=objective) for item in wanted]
    for single in singles:
        numbers(single.evidence, objective)
    model.memory = memory
    for one, single in zip(written(model, wanted, random, objective), singles, strict=True):
        require_alike(one, single, objective)


def test_all_answers_together_stay_within_the_budgets() -> None:
    model = wrapped("qwen2")
    model.memory = Memory(logits=20_000, outputs=20_000)
    batch, held = model.running_batch(), list[list[int]]()
    for number in range(8):
        joined(model, batch, [(f"q{number}", Options(max_tokens=40))])
        for _ in range(3):
            batch.step()
        captures = {id(capture): capture for row in batch.rows for capture, _ in row.passes}.values()
        held.append([sum(kind) for kind in zip((0, 0), *(capture.held for capture in captures), strict=True)])
    assert 10_000 < max(logits for logits, _ in held) <= 20_000
    assert 10_000 < max(outputs for _, outputs in held) <= 20_000


def test_scored_sentences_free_the_budgets_and_change_no_other_score() -> None:
    model, options, questions = shared("qwen2"), Options(max_tokens=14), ["tea", "What is tea?", "Why?"]
    batch = model.running_batch()
    rows = joined(model, batch, [(question, options) for question in questions])
    for steps, scored in ((7, 5), (4, 9)):
        for _ in range(steps):
            batch.step()
        batch.ended(rows, [[(0, 2)]] * 3, [0] * 3)
        for at_once in (rows[:2], rows[2:]):
            batch.let_go([(row, scored) for row in at_once])
    held = {id(capture): capture.held[0] for row in rows for capture, _ in row.passes}
    assert sorted(logits > 0 for logits in held.values()) == [False] * 3 + [True] * 2  # prompts, last steps
    finished(batch)
    for one, question in zip(batch.generations(rows, [1, 0, None]), questions, strict=True):
        single = model.generate(question, options)
        ours, theirs = (sentence_evidence(answer.evidence, (9, 5), ["", ""], known=1)[1] for answer in (one, single))
        assert ours is not None
        assert theirs is not None
        assert numbers(ours, Objective()) == pytest.approx(numbers(theirs, Objective()), rel=1e-4)
        require_alike(one, single)


def test_outputs_are_let_go_of_at_scored_tokens_alone() -> None:
    model, options = shared("qwen2"), Options(max_tokens=14)
    left: list[CapturedStates] = []
    for lets_go in (False, True):
        batch = model.running_batch()
        (row,) = joined(model, batch, [("What is tea?", options)])
        for steps, scored in ((7, 5), (4, 9)):
            for _ in range(steps):
                batch.step()
            batch.ended([row], [[(0, 2)]], [0])
            if lets_go:
                batch.let_go([(row, scored)])
        batch.ended([row], [[(0, 2)]], [0])
        states = batch.left_by([row])
        assert states is not None
        left.append(states)
    whole, rest = left
    (first, past), end = rest.gap, rest.begins + rest.states.shape[1]
    assert whole.gap == (0, 0)
    assert 0 < first < past < rest.states.shape[1]
    for begin, until in ((rest.begins, rest.begins + first), (rest.begins + past, end)):
        assert not rest.lacks(begin, until)
        assert rest.outputs.keys() == whole.outputs.keys()
        for place in rest.outputs:
            torch.testing.assert_close(rest.output(place, begin, until), whole.output(place, begin, until))
    assert rest.lacks(rest.begins, end)
    assert rest.lacks(rest.begins + past - 1, end)


def test_prompts_that_are_known_are_read_from_where_they_differ() -> None:
    model, whole = wrapped("qwen2"), shared("qwen2")
    model.memory = Memory(prompts=1 << 26)
    system = "Answer with a few words, and do not say more than you were asked. "
    options = Options(max_tokens=4)
    batch, rows = model.running_batch(), list[RunningAnswer]()
    questions = [[Message("system", system), Message("user", text)] for text in ("What is tea?", "What is it?", "So?")]
    for question in questions:
        prompt = model.render(question)
        rows += batch.join([BatchRequest(prompt, model.fitted(options, prompt)) for _ in range(2)])
        finished(batch)
    found = batch.generations(rows)
    assert [generation.reused_tokens > len(system) for generation in found] == [False, False, True, True, True, True]
    for number, one in enumerate(found):
        single = whole_run(whole, questions[number // 2], options)
        assert one.response_ids == single.response_ids
        assert numbers(one.evidence, Objective()) == pytest.approx(numbers(single.evidence, Objective()), rel=1e-4)
    # and what a batch has read serves a single request
    assert whole_run(model, questions[0], options).reused_tokens > len(system)
    assert model._scorer.twin.prompts.bytes > 0
