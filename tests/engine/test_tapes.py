"""What passes leave: kept within budgets, used in the place of work, and let go of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel, Memory
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores import replay as replay_module
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.replay import replay
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import FRUGAL, Recorder, Row

from .cases import CASES, taped
from .running import finished, joined, wrapped
from .tiny_models import shared

LONG = GenerationOptions(max_tokens=7, temperature=1.0, seed=1)
OBSERVING = Objective(gradients=False)
MAPS = {"llama": 7, "qwen2": 7, "gemma2": 7, "phi3": 4, "gpt-neox": 4, "mixtral": 4, "opt": 4, "gpt2": 0}
"""Linear maps of a layer that give [batch, positions, out]: experts' give less, GPT-2 has other modules."""


def written() -> tuple[LanguageModel, Row]:
    """An answer of a model's own, on tape; what it takes to score it was verified before."""
    model = wrapped("llama")
    batch = model.running_batch()
    (row,) = joined(model, batch, [("What is tea?", LONG)])
    finished(batch)
    found = Row.of(row.prompt.ids, row.ids, row.prompt.semantic_token.offset, Objective(), tape=row.tape())
    scored(model, replace(found, tape=None))
    return model, found


def scored(model: LanguageModel, row: Row) -> GradientScores:
    return model.scorer.score([row], Objective())[0]


def passes(model: LanguageModel, layer: int) -> list[int]:
    """The tokens that a layer reads from now on."""
    seen: list[int] = []
    model.scorer.twin.layers[layer].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    return seen


def test_a_score_runs_the_upper_layers_once_from_the_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = written()
    seen, products = passes(model, 4), list[int]()
    linear = torch.nn.functional.linear
    head: Any = model.scorer.twin.head
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, b=None: (products.append(id(w)), linear(x, w, b))[1]
    )
    scored(model, row)
    assert seen == [row.live_count]
    assert products == [], "neither a map whose output is known, nor the head"
    scored(model, replace(row, tape=None))
    assert len(products) == 5 * 7, "those that reading takes"
    assert id(head.weight) not in products


@pytest.mark.parametrize("what", ["logits", "outputs"])
def test_what_was_kept_is_taken_at_its_word(what: str) -> None:
    model, row = written()
    right = scored(model, row)
    assert row.tape is not None
    for recorder, _ in row.tape.passes:
        if what == "logits":
            recorder.logits = [step.roll(1, dims=1) for step in recorder.logits or ()]
        else:
            recorder._outputs = {place: [2 * one for one in own] for place, own in recorder._outputs.items()}
    wrong = scored(model, row)
    number = "greedy_nll" if what == "logits" else "semgrad"
    assert getattr(right, number) != pytest.approx(getattr(wrong, number), rel=1e-3)


@pytest.mark.parametrize(("name", "maps"), MAPS.items())
def test_the_maps_of_the_upper_layers_are_kept_and_no_others(name: str, maps: int) -> None:
    scorer, objective = scorer_of(shared(name)), Objective()
    scorer.memory = Memory()
    first = objective.span(scorer.architecture.n_layers)[0]
    (row,) = taped(scorer, [CASES[0].row(objective)], first)
    assert row.tape is not None
    outputs = row.tape.places(row.live)
    assert len(outputs) == maps * (scorer.architecture.n_layers - first)
    assert all(layer >= first for layer, _ in outputs)


def test_all_answers_together_stay_within_the_budgets() -> None:
    model = wrapped("qwen2")
    model.memory = Memory(logits=20_000, outputs=20_000)
    batch, held = model.running_batch(), list[list[int]]()
    for number in range(8):
        joined(model, batch, [(f"q{number}", GenerationOptions(max_tokens=40))])
        for _ in range(3):
            batch.step()
        recorders = {id(one): one for row in batch.rows for one, _ in row.passes}.values()
        held.append([sum(kind) for kind in zip((0, 0), *(one.held for one in recorders), strict=True)])
    assert 10_000 < max(logits for logits, _ in held) <= 20_000
    assert 10_000 < max(outputs for _, outputs in held) <= 20_000


@pytest.mark.parametrize("pieces", [[9], [4, 5], [6, 3], [1] * 9, [7, 1, 1]], ids=str)
def test_the_same_states_are_kept_however_they_arrive(pieces: list[int]) -> None:
    """Prefill in one go, in pieces, or token by token; and no view of the whole prompt is kept alive."""
    hidden, recorder = torch.randn(2, 9, 3), Recorder(1, 6)
    for piece in hidden.split(pieces, dim=1):
        recorder.see_hidden(piece)
    assert torch.equal(recorder.hidden(), hidden[:, 6:])
    assert recorder.hidden().untyped_storage().nbytes() == 2 * 3 * 3 * 4


def test_a_prefill_keeps_the_heads_output_at_its_last_position_alone() -> None:
    recorder, prefill = Recorder(1, memory=Memory(logits=1 << 20)), torch.randn(2, 5, 9)
    recorder.see_head(prefill, prefill)
    assert recorder.logits is not None
    (kept,) = recorder.logits
    assert torch.equal(kept, prefill[:, -1])
    assert kept.untyped_storage().nbytes() == 2 * 9 * 4


def test_a_map_that_is_called_twice_a_pass_is_not_believed() -> None:
    recorder = Recorder(0, memory=Memory(outputs=1 << 20))
    recorder.see_hidden(torch.randn(1, 3, 4))
    for _ in range(2):
        recorder.see_output((0, "map"), torch.randn(1, 3, 6))
    assert not recorder.places()


def held_by_graph(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that autograd keeps for the backward pass of a replay, each storage once."""
    storages: dict[int, int] = {}
    scorer, objective = scorer_of(shared("llama")), Objective()
    span = objective.span(scorer.architecture.n_layers)

    def hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            if isinstance(packed := pack(tensor), torch.Tensor):
                storages[packed.untyped_storage().data_ptr()] = packed.untyped_storage().nbytes()
            return packed

        return torch.autograd.graph.saved_tensors_hooks(counted, unpack)

    monkeypatch.setattr(replay_module, "saved_tensors_hooks", hooks)
    rows = taped(scorer, [case.row(objective) for case in CASES], span[0])
    with clean_slate(), replay(scorer.twin, rows, span, fits=bool(memory.activations)) as (predicting, hidden):
        torch.autograd.grad(predicting, hidden, torch.ones_like(predicting))
    weights = {p.untyped_storage().data_ptr() for p in scorer.twin.model.parameters()}
    return sum(size for at, size in storages.items() if at not in weights)


def test_a_frugal_replay_holds_a_fraction_and_puts_the_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = scorer_of(shared("llama")).twin.layers
    before = [vars(layer).get("forward") for layer in layers]
    assert held_by_graph(FRUGAL, monkeypatch) < held_by_graph(Memory(), monkeypatch) / 2
    assert [vars(layer).get("forward") for layer in layers] == before


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_observing_takes_no_pass_within_the_budget_and_beyond_it(
    make_language_model: Callable[..., LanguageModel], kept: int
) -> None:
    """Where its output was not kept, the head is read again from the states before it: the numbers are the same."""
    model = make_language_model()
    model.memory = Memory(logits=kept * model.scorer.vocabulary * 4)
    generation = model.generate("What is tea?", replace(LONG, max_tokens=9), objective=OBSERVING)
    expected = generation.evidence.alone().observed()
    generation.evidence.observed()  # verified
    again = model.generate("What is tea?", replace(LONG, max_tokens=9), objective=OBSERVING)
    seen, head = passes(model, 0), list[int]()
    model.scorer.twin.head.register_forward_pre_hook(lambda *_: head.append(1))
    found = again.evidence.observed()
    assert (seen, head) == ([], [])
    assert found is not None
    assert expected is not None
    assert found.log_probs == pytest.approx(expected.log_probs, rel=1e-5, abs=1e-6)
    assert found.state == pytest.approx(expected.state, rel=1e-4, abs=1e-6)
