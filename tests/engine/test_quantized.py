"""Quantized weights, by a library of that trade: exact where a gradient can flow, refused where it cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from semgrad_guard import gradient_scores
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scoring import Scorer
from semgrad_guard.errors import UnsupportedModelError

from .oracle import worst_relative_error
from .scoring_paths import CASES, score_in_tier
from .tiny_models import shared


def quantized(config: Any, *, head: bool = False) -> Any:
    model = copy.deepcopy(shared("llama")).float()
    quantize_(
        model, config, filter_fn=lambda module, path: isinstance(module, nn.Linear) and (head or "head" not in path)
    )
    return model


@pytest.mark.parametrize("tier", ["captured", "prefix", "full"])
def test_quantized_weights_are_scored_as_plain_autograd_scores_them(tier: Any) -> None:
    model = quantized(Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
    found = score_in_tier(tier, model, CASES, Objective())
    expected = [case.reference(model, Objective()) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-3


def test_quantized_activations_are_refused() -> None:
    model = quantized(Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(UnsupportedModelError, match="no gradient reaches"):
        Scorer(model).tiers()


def test_a_quantized_head_is_refused() -> None:
    case, model = CASES[0], quantized(Int8WeightOnlyConfig(), head=True)
    with pytest.raises(UnsupportedModelError, match="unquantized lm_head"):
        gradient_scores(model, case.prompt, case.response, semantic_token=-3)
