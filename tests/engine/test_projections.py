"""What linear maps gave while generating: kept within a budget, used instead of products, and changing no score."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import kernels
from semgrad_guard.engine.replay.memory import FRUGAL, Memory
from semgrad_guard.engine.replay.captured_states import Capture
from semgrad_guard.engine.replay.kernels import Projections
from semgrad_guard.engine.scores.scorer import Scorer
from tests.pairwise import in_turn

from .oracle import worst_relative_error
from .scoring_paths import answered, batch_of, score_in_tier
from .tiny_models import ARCHITECTURES, shared

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")
MAPS = {"llama": 7, "qwen2": 7, "gemma2": 7, "phi3": 4, "gpt-neox": 4, "mixtral": 4, "opt": 4, "gpt2": 0}
"""Linear maps of a layer that give [batch, positions, out]: experts' give less, GPT-2 has other modules."""


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product that a replay takes."""
    taken: list[int] = []
    linear_map = kernels.linear_map

    def counted(linear: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        taken.append(states.shape[-2])
        return linear_map(linear, states)

    monkeypatch.setattr(kernels, "linear_map", counted)
    return taken


@in_turn(name=sorted(ARCHITECTURES), lengths=[(6, 1, 4), (3, 1, 2)])
def test_scores_are_those_of_products_taken_again(name: str, lengths: tuple[int, ...]) -> None:
    """Answers cut by a stop string end before the outputs do."""
    cases, captured = answered(name, lengths=lengths)
    kept = score_in_tier("captured", shared(name), cases, Objective(), captured)
    again = score_in_tier("captured", shared(name), cases, Objective(), dataclasses.replace(captured, outputs={}))
    expected = [case.reference(shared(name), Objective()) for case in cases]
    assert max(map(worst_relative_error, kept, expected)) < 1e-7
    for a, b in zip(kept, again, strict=True):
        assert a.semgrad == pytest.approx(b.semgrad, rel=1e-9)
        assert a.paragrad == pytest.approx(b.paragrad, rel=1e-9)


@pytest.mark.parametrize(("name", "maps"), MAPS.items())
def test_the_maps_of_the_upper_layers_are_kept_and_no_others(name: str, maps: int) -> None:
    _, captured = answered(name)
    n_layers = Scorer(shared(name)).architecture.n_layers
    assert len(captured.outputs) == maps * (n_layers - captured.layer)
    assert all(layer >= captured.layer for layer, _ in captured.outputs)
    assert {tuple(output.shape[:2]) for output in captured.outputs.values()} <= {tuple(captured.states.shape[:2])}


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "opt"])
def test_layers_that_are_run_twice_know_the_outputs_both_times(name: str, products: list[int]) -> None:
    cases, captured = answered(name)
    scorer = Scorer(shared(name))
    scorer.memory = Memory(activations=0)
    scorer.tiers()
    products.clear()
    found = scorer.score(batch_of(cases), Objective(), captured)
    assert {scores.tier for scores in found} == {"captured"}
    assert (products == []) == (name != "opt")
    expected = [case.reference(shared(name), Objective()) for case in cases]
    assert max(map(worst_relative_error, found, expected)) < 1e-7


def test_a_replay_takes_no_product_whose_output_is_known(products: list[int]) -> None:
    cases, captured = answered("llama")
    scorer, batch = Scorer(shared("llama")), batch_of(cases)
    scorer.tiers()
    products.clear()
    scorer.score(batch, Objective(), captured)
    assert products == []
    scorer.score(batch, Objective(), dataclasses.replace(captured, outputs={}))
    assert len(products) == 7 * (scorer.architecture.n_layers - captured.layer)


def test_wrong_outputs_show_in_the_scores() -> None:
    cases, captured = answered("llama")
    doubled = {place: output * 2 for place, output in captured.outputs.items()}
    right = score_in_tier("captured", shared("llama"), cases, Objective(), captured)
    wrong = score_in_tier(
        "captured", shared("llama"), cases, Objective(), dataclasses.replace(captured, outputs=doubled)
    )
    assert right[0].semgrad != pytest.approx(wrong[0].semgrad, rel=1e-3)


def test_beyond_the_budget_fewer_maps_are_kept(products: list[int]) -> None:
    cases, ample = answered("llama")
    for share in (3, 2, 1):
        budget = share * sum(output.nbytes for output in ample.outputs.values()) // 4
        _, captured = answered("llama", output_bytes=budget)
        assert sum(output.nbytes for output in captured.outputs.values()) <= budget
        assert 0 < len(captured.outputs) < len(ample.outputs)
        for place, output in captured.outputs.items():
            assert torch.equal(output, ample.outputs[place])
        products.clear()
        found = score_in_tier("captured", shared("llama"), cases, Objective(), captured)
        assert products
        expected = [case.reference(shared("llama"), Objective()) for case in cases]
        assert max(map(worst_relative_error, found, expected)) < 1e-7


def test_the_budget_is_kept_to_the_byte() -> None:
    _, ample = answered("llama", output_bytes=1 << 20)
    held = sum(output.nbytes for output in ample.outputs.values())
    assert answered("llama", output_bytes=held + 1)[1].outputs.keys() == ample.outputs.keys()
    assert answered("llama", output_bytes=0)[1].outputs == {}
    assert FRUGAL.outputs == 0 < Memory().outputs


def test_outputs_that_a_model_changes_in_place_are_not_believed() -> None:
    capture, linear = Capture(0, 0, memory=Memory(outputs=1 << 20)), nn.Linear(4, 6)
    maps, states = Projections([linear]), torch.randn(1, 3, 4)
    with torch.no_grad(), maps.listening(capture.see_output):
        capture(states)
        given = linear(states)
        assert capture.outputs().keys() == {(0, "")}
        given.mul_(0.5)
    assert capture.outputs() == {}


def test_a_map_that_is_called_twice_a_pass_is_not_believed() -> None:
    capture, linear = Capture(0, 0, memory=Memory(outputs=1 << 20)), nn.Linear(4, 6)
    maps, states = Projections([linear]), torch.randn(1, 3, 4)
    with torch.no_grad(), maps.listening(capture.see_output):
        capture(states)
        linear(states)
        linear(states)
    assert capture.outputs() == {}
