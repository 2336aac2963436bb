"""A running batch while listeners fail, stops come, models change and memory is short: the other answers stay right."""

from __future__ import annotations

import gc
import weakref
from random import Random
from typing import Any

import pytest
import torch

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.engine.prompts.forms import one_of, text_rule
from semgrad_guard.errors import AnswerCancelledError, AnswerInterruptedError
from tests.whole_runs import whole_run

from .running import Options, Wanted, finished, joined, row_of, shared, wrapped


def some(random: Random, count: int) -> list[Wanted]:
    """Questions of very unequal length, with options of their own."""
    questions = ["".join(random.choices("abc de?", k=random.choice((1, 2, 5, 20, 60)))) + "x" for _ in range(count)]
    return [
        (text, Options(max_tokens=random.choice((1, 2, 3, 8)), stop=random.choice(((), ("a",), ("e", "ab")))))
        for text in questions
    ]


def numbers(answer: Generation) -> list[float]:
    """What is recorded of an answer."""
    timed = answer.evidence.gradients()
    if timed is None:
        return []
    scores = timed.scores
    return [*scores.log_probs, *scores.entropies, *(s for s in (scores.semgrad, scores.paragrad) if s is not None)]


def require_alike(one: Generation, single: Generation) -> None:
    """An answer from a batch is that of a single request."""
    names = ("response_ids", "text", "finish_reason", "cut", "completion_tokens")
    assert [getattr(one, name) for name in names] == [getattr(single, name) for name in names]
    assert numbers(one) == pytest.approx(numbers(single), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_somebody_who_cannot_hear_harms_nobody(at: int) -> None:
    model, pieces = shared("llama"), list[str]()
    # The last letter may begin the stop string, and is held back until the end.
    options = Options(max_tokens=4, grammar=one_of([text_rule("wbcd", {})]), stop=("dx",))

    def listener(piece: str) -> None:
        if len(pieces) == at:
            raise RuntimeError("gone")
        pieces.append(piece)

    batch, other = model.running_batch(), ("you", Options(max_tokens=6))
    rows = [row_of(model, ("Hi", options), listener), row_of(model, other)]
    batch.join(rows)
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
        rows = [row_of(model, item, own.append) for item, own in zip(wanted, pieces, strict=True)]
        batch.join(rows)
        finished(batch)
        found = batch.generations(rows)
        assert ["".join(own) for own in pieces] == [generation.text for generation in found]
        assert [own for own in pieces if "" in own] == []


def test_a_stop_ends_a_join_and_nothing_else() -> None:
    model = wrapped("llama")
    batch, wanted = model.running_batch(), ("Hi", Options(max_tokens=6))
    rows = joined(model, batch, [wanted])
    stop, read = Stop(), list[int]()

    def count(*_: Any) -> None:
        read.append(1)
        if len(read) == 2:
            stop.cancel()

    layer: Any = model.scorer.twin.layers[0]
    hook = layer.register_forward_pre_hook(count)
    with stopping(stop), pytest.raises(AnswerCancelledError):
        joined(model, batch, [("a", Options(max_tokens=6)), ("b" * 90, Options(max_tokens=6))])
    hook.remove()
    assert list(batch.rows) == rows, "the first of the two had been read"
    finished(batch)
    require_alike(batch.generations(rows)[0], whole_run(shared("llama"), *wanted))


def test_a_step_that_is_stopped_leaves_an_empty_batch_that_can_be_used() -> None:
    model, wanted, stop = shared("llama"), ("Hi", Options(max_tokens=6)), Stop()
    batch = model.running_batch()
    joined(model, batch, [wanted, ("you", Options(max_tokens=6))])
    layer: Any = model.scorer.twin.layers[1]
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
    ways = {"step": lambda: finished(batch), "join": lambda: joined(model, batch, [wanted])}
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
