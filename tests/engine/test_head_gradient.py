"""ParaGrad alone: the number of a whole replay, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.estimators import ExGrad, ParaGrad
from tests.random_llama import byte_tokenizer

from .tiny_models import ARCHITECTURES, build, shared, token_ids

PROMPTS = ["A", "What is it, then?", "Hello there"]
LONG = GenerationOptions(max_tokens=7, temperature=1.0, seed=1)
OBSERVING = Objective(gradients=False)
CONFIGURED = [
    ParaGrad().objective,
    ParaGrad("official").objective,
    ParaGrad(norm="l2").objective,
    ParaGrad(sampled_rows=40).objective,
    ExGrad().objective,
]


@pytest.mark.parametrize("kept", [OBSERVING, Objective()], ids=["observing", "for gradients"])
@pytest.mark.parametrize("objective", CONFIGURED, ids=str)
def test_it_is_a_replays_number(language_model: LanguageModel, objective: Objective, kept: Objective) -> None:
    """Of answers that were generated together, and of a text from elsewhere."""
    generations = language_model.generate_batch(PROMPTS, LONG, objective=kept)
    for evidence in (*(generation.evidence for generation in generations), language_model.evidence("x", "abc")):
        found = evidence.head_gradient(objective)
        timed = evidence.gradients(objective)
        assert found is not None
        assert timed is not None
        assert (found.paragrad, found.reason) == (pytest.approx(timed.scores.paragrad, rel=1e-5), None)
        assert found.error == (None if objective.sampled_rows is None else pytest.approx(timed.scores.paragrad_error))


def test_no_layer_runs_again(language_model: LanguageModel) -> None:
    generations = language_model.generate_batch(PROMPTS, LONG, objective=OBSERVING)
    calls = list[str]()
    layers: Any = language_model._scorer.current_replayer().layers
    handles = [layer.register_forward_hook(lambda *_: calls.append("layer")) for layer in layers]
    try:
        assert all(generation.evidence.head_gradient() for generation in generations)
        assert generations[0].scoring.part([0, 2]).evidence[1].head_gradient()
        assert calls == []
        assert language_model.evidence("x", "abc").head_gradient()
        assert len(calls) == len(layers), "a text from elsewhere takes one pass"
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name: str) -> None:
    scorer, objective = scorer_of(shared(name)), Objective()
    batch = TokenBatch.of(
        [token_ids(9, 1), token_ids(5, 2)], [token_ids(4, 3), token_ids(6, 4)], [-1, -1], scorer.device
    )
    for found, scores in zip(scorer.head_gradients(batch, objective), scorer.score(batch, objective), strict=True):
        assert found.paragrad == pytest.approx(scores.paragrad, rel=1e-5)


def test_a_part_of_a_batch_whose_cache_stays_whole() -> None:
    """Layers with a window have a cache that is not taken apart: what was observed is."""
    sizes: dict[str, Any] = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257, "sliding_window": 4}
    model = LanguageModel.from_transformers(build("mistral", dtype=torch.float32, **sizes), byte_tokenizer())
    generations = model.generate_batch(PROMPTS, LONG, objective=OBSERVING)
    whole = [generation.evidence.head_gradient() for generation in generations]
    part = [evidence.head_gradient() for evidence in generations[0].scoring.part([0, 2]).evidence]
    for found, expected in zip(part, (whole[0], whole[2]), strict=True):
        assert found is not None
        assert expected is not None
        assert found.paragrad == pytest.approx(expected.paragrad, rel=1e-5)


def test_a_number_that_is_none(make_language_model: Callable[..., LanguageModel]) -> None:
    model = make_language_model(seed=4)
    generation = model.generate("A", LONG)
    with torch.no_grad():
        model._model.get_output_embeddings().weight.fill_(float("inf"))
    found = generation.evidence.head_gradient()
    assert found is not None
    assert (found.paragrad, found.reason) == (None, "the gradient is not finite")
