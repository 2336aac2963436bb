"""Half precision keeps ranks; NaN and infinity never leave as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import scorer_of
from tests.pairwise import in_turn, pairwise

from .tiny_models import build, token_ids

PROMPTS = [token_ids(6 + i % 9, 100 + i) for i in range(30)]
RESPONSES = [token_ids(1 + i % 6, 200 + i) for i in range(30)]


def scores_of(model: Any, count: int = 30) -> list[GradientScores]:
    return gradient_scores(model, PROMPTS[:count], RESPONSES[:count], semantic_token=-3)


@in_turn(name=["llama", "gpt2", "gemma3"], dtype=[torch.bfloat16, torch.float16])
def test_half_precision_ranks_like_double(name: str, dtype: torch.dtype) -> None:
    """The weights are the same numbers in both, so that only the arithmetic differs."""
    half = build(name, dtype=dtype)
    low = scores_of(half)
    exact = scores_of(build(name, dtype=dtype).double())
    for figure in ("semgrad", "paragrad", "hybridgrad", "mean_entropy"):
        pairs = [(getattr(a, figure), getattr(b, figure)) for a, b in zip(low, exact, strict=True)]
        assert spearmanr(pairs).statistic > (0.98 if dtype == torch.float16 else 0.95), figure
        errors = sorted(abs(a - b) / b for a, b in pairs)
        assert errors[15] < (0.01 if dtype == torch.float16 else 0.06), figure


@pytest.mark.parametrize("sharpness", [12, 20])
def test_float16_keeps_the_scores_of_nearly_certain_answers(sharpness: float) -> None:
    """Their gradients (1e-8, 1e-13) are below what float16 can hold: the seed travels back scaled.

    Rounded states move such small probabilities by some per cent, on each kind of processor by others.
    """
    half = build("gpt2", dtype=torch.float16, tie_word_embeddings=False)
    with torch.no_grad():
        half.lm_head.weight.mul_(sharpness)
    prompt = torch.tensor([token_ids(8, 3)])
    mask = torch.ones_like(prompt)
    response = half.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False, eos_token_id=None)[:, 8:]
    [found] = gradient_scores(half, prompt.tolist(), response.tolist(), semantic_token=-3)
    [exact] = gradient_scores(half.double(), prompt.tolist(), response.tolist(), semantic_token=-3)
    assert found.semgrad == pytest.approx(exact.semgrad, rel=0.2)
    assert found.paragrad == pytest.approx(exact.paragrad, rel=0.2)


def test_a_gradient_that_overflows_gives_a_reason_and_keeps_the_finite_figures() -> None:
    model = build("llama")

    def overflow(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    model.model.layers[4].register_forward_hook(overflow)
    found = gradient_scores(model, PROMPTS[0], RESPONSES[1], semantic_token=-3)
    assert found.semgrad is found.paragrad is found.hybridgrad is None
    assert "overflow" in (found.reason or "")
    assert math.isfinite(found.mean_entropy or math.nan)
    assert len(found.entropies) == len(RESPONSES[1])


@pairwise(
    value=[float("nan"), float("inf"), float("-inf")],
    weight=["lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_broken_weights_give_a_reason_and_no_number(weight: str, value: float, dtype: torch.dtype) -> None:
    sound, broken = build("llama", dtype=dtype), build("llama", dtype=dtype)
    for checked_before in (False, True):
        model = sound if checked_before else broken
        if checked_before:
            scorer_of(model).exactness()
        with torch.no_grad():
            model.get_parameter(weight)[:, ::2] = value
        for found in scores_of(model, 3):
            assert found.reason
            assert found.semgrad is found.paragrad is found.hybridgrad is None
            numbers = (found.mean_entropy, found.greedy_nll, *found.entropies, *found.log_probs)
            assert all(number is None or math.isfinite(number) for number in numbers)
