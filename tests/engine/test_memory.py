"""Budgets of memory: scores stay the same, and what is held goes down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import kernels
from semgrad_guard.engine.replay.memory import FRUGAL, Memory
from semgrad_guard.engine.replay.hooks import activation_bytes
from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate
from tests.pairwise import in_turn

from .oracle import worst_relative_error
from .cases import CASES, batch_of
from .tiny_models import shared

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")


def held_by_graph(scorer: Scorer, memory: Memory) -> int:
    """Bytes that autograd keeps for the backward pass of a captured replay, each storage once."""
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for layer in scorer.current_replayer().layers for p in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch, span = batch_of(CASES), Objective().span(scorer.architecture.n_layers)
    replayer: Replayer = scorer.current_replayer()
    replayer.memory = memory
    with clean_slate(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replayed = replayer.captured(batch, span, replayer.record(batch, span[0]))
        held = sum(size for at, size in storages.items() if at not in weights)
    assert replayed.final.grad_fn is not None
    return held


@in_turn(name=["llama", "gemma2", "mixtral", "gpt2", "qwen3", "opt", "phi3"], tier=["captured", "prefix"])
def test_checkpointed_replays_are_exact(name: str, tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LARGE", 1)  # the second run of a layer must take the same order of products
    scorer, batch, objective = Scorer(shared(name)), batch_of(CASES), Objective()
    scorer.memory = FRUGAL
    captured = scorer.current_replayer().record(batch, objective.span(scorer.architecture.n_layers)[0])
    found = scorer.score(batch, objective, captured if tier == "captured" else None)
    assert {scores.tier for scores in found} == {tier}
    expected = [case.reference(shared(name), objective) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-7


def test_a_frugal_replay_holds_a_fraction() -> None:
    scorer = Scorer(shared("llama"))
    assert held_by_graph(scorer, FRUGAL) < held_by_graph(scorer, Memory()) / 4


def test_the_estimate_is_of_the_right_size() -> None:
    scorer, batch = Scorer(shared("llama")), batch_of(CASES)
    first = Objective().span(scorer.architecture.n_layers)[0]
    layers = list(scorer.current_replayer().layers)[first:]
    estimate = activation_bytes(layers, len(CASES) * (batch.end - batch.cut))
    assert 0.3 < estimate / held_by_graph(scorer, Memory()) < 3


def test_layers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(shared("llama"))
    layers = list(scorer.current_replayer().layers)
    before = [vars(layer).get("forward") for layer in layers]
    held_by_graph(scorer, FRUGAL)
    assert [vars(layer).get("forward") for layer in layers] == before


def test_a_language_model_can_be_told(language_model: LanguageModel) -> None:
    usual = language_model.memory
    options, scores = GenerationOptions(max_tokens=4), []
    try:
        for memory in (usual, replace(usual, logits=0), FRUGAL):
            language_model.memory = memory
            timed = language_model.generate("What is the capital of France?", options).evidence.gradients()
            assert timed is not None
            scores.append(timed.scores.hybridgrad)
    finally:
        language_model.memory = usual
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-3)
