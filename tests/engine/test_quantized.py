"""Quantized weights, in the forms that libraries give them: exact where a gradient can flow, refused where it cannot.

The forms are made here (a tensor of another class in a plain layer, as torchao has it; a layer of another class, as
bitsandbytes has it): importing torchao alone prints warnings into everything that loads transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semgrad_guard import gradient_scores
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import skinny_linear
from semgrad_guard.engine.scoring.scorer import Scorer
from semgrad_guard.engine.scoring.scores import Tier
from semgrad_guard.errors import UnsupportedModelError

from .oracle import worst_relative_error
from .scoring_paths import CASES, score_in_tier
from .tiny_models import shared


class Int8Weight(torch.Tensor):
    """Whole numbers with a scale for every row; only linear layers know what to do with it."""

    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        made = torch.round(weight / scale).as_subclass(cls)  # libraries' tensors claim the dtype they had as well
        made.scale = scale
        return made

    def __deepcopy__(self, _: object) -> Int8Weight:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear:
            made = super().__torch_function__(function, types, args, kwargs or {})
            if isinstance(made, cls) and "scale" in vars(args[0]):
                made.scale = args[0].scale  # a parameter is a detached tensor
            return made
        states, weight, *bias = args
        plain = weight.as_subclass(torch.Tensor) * weight.scale
        return F.linear(states, plain, *bias)


class Int8Linear(nn.Linear):
    """A layer that keeps its weight in eight bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, Int8Weight.of(self.weight.detach()), self.bias)


class RoundedLinear(nn.Linear):
    """A layer that rounds what comes in."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.round(input * 64) / 64, self.weight, self.bias)


def another_tensor(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(Int8Weight.of(linear.weight.data), requires_grad=False)


def another_layer(kind: type[nn.Linear]) -> Callable[[nn.Linear], None]:
    return lambda linear: setattr(linear, "__class__", kind)


def quantized(quantize: Callable[[nn.Linear], None], *, head: bool = False) -> Any:
    model = copy.deepcopy(shared("llama")).requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (head or "head" not in path):
            quantize(module)
    return model


@pytest.mark.parametrize("tier", ["captured", "prefix", "full"])
@pytest.mark.parametrize("form", [another_tensor, another_layer(Int8Linear)], ids=["tensor", "layer"])
def test_quantized_weights_are_scored_as_plain_autograd_scores_them(
    form: Callable[[nn.Linear], None], tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_linear, "_LARGE", 1)
    model = quantized(form)
    found = score_in_tier(tier, model, CASES, Objective())
    expected = [case.reference(model, Objective()) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-7
    plain = score_in_tier(tier, shared("llama"), CASES, Objective())
    assert plain[0].semgrad != pytest.approx(found[0].semgrad, rel=1e-4), "nothing was quantized"


def test_rounded_activations_are_refused() -> None:
    model = quantized(another_layer(RoundedLinear))
    with pytest.raises(UnsupportedModelError, match="no gradient reaches"):
        Scorer(model).tiers()


def test_a_quantized_head_is_refused() -> None:
    case, model = CASES[0], quantized(another_tensor, head=True)
    with pytest.raises(UnsupportedModelError, match="unquantized lm_head"):
        gradient_scores(model, case.prompt, case.response, semantic_token=-3)
