"""Quantized weights, in the forms that libraries give them: exact where a gradient can flow, refused where it cannot.

The forms are made here (a tensor of another class in a plain layer, as torchao has it; a layer of another class, as
bitsandbytes has it): importing torchao alone prints warnings into everything that loads transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from semgrad_guard import gradient_scores
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of
from semgrad_guard.errors import UnsupportedModelError

from .cases import CASES, scored
from .oracle import worst_relative_error
from .snapshots import unchanged
from .switches import plain_scores
from .tiny_models import build, shared


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


class RepackingLinear(nn.Linear):
    """A layer that, in the first pass without a gradient, repacks its weight for a kernel that has none."""

    packed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.packed or self.training or input.requires_grad) and getattr(self, self.switch):
            self.weight.data, self.packed = self.weight.data.t().contiguous(), True
        if self.packed:
            return F.linear(input.detach(), self.weight.detach().t(), self.bias)
        return F.linear(input, self.weight, self.bias)


def repacking(switch: str) -> Callable[[nn.Linear], None]:
    def quantize(linear: nn.Linear) -> None:
        another_layer(RepackingLinear)(linear)
        vars(linear).update({"switch": switch, switch: True})

    return quantize


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


@pytest.mark.parametrize("form", [another_tensor, another_layer(Int8Linear)])
def test_quantized_weights_are_scored_as_plain_autograd_scores_them(form: Callable[[nn.Linear], None]) -> None:
    model = quantized(form)
    found = scored(model, CASES)
    assert {scores.tier for scores in found} == {"replay"}
    expected = [case.reference(model, Objective()) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-7
    plain = scored(shared("llama"), CASES)
    assert plain[0].semgrad != pytest.approx(found[0].semgrad, rel=1e-4), "nothing was quantized"


def test_rounded_activations_are_refused() -> None:
    model = quantized(another_layer(RoundedLinear))
    with pytest.raises(UnsupportedModelError, match="no gradient reaches"):
        scorer_of(model).exactness()


def answer(model: Any) -> GradientScores:
    """An answer of the model's own, scored."""
    case = CASES[0]
    with unchanged(model):
        with clean_slate(), torch.no_grad():
            scorer_of(model).twin.generate(torch.tensor([case.prompt]), torch.ones(1, 11), max_new_tokens=2)
        return gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)


def test_a_kernel_without_autograd_is_not_taken_in_the_copy() -> None:
    """bitsandbytes' way: the switch has the name that it has there."""
    model = quantized(repacking("support_avx512bf16_for_cpu"))
    found = answer(model)
    assert worst_relative_error(found, CASES[0].reference(shared("llama"), Objective())) < 1e-7
    assert found.tier == "replay"


def test_an_unknown_kernel_without_autograd_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="differentiated"):
        answer(quantized(repacking("some_library_s_own_switch")))


class TestBitsAndBytes:
    """The library itself, on a CPU, where it is installed."""

    @pytest.fixture(params=["nf4", "fp4"])
    def model(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        pytest.importorskip("bitsandbytes")
        form = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=request.param,
            bnb_4bit_use_double_quant=request.param == "fp4",
            bnb_4bit_compute_dtype=torch.float32,
        )
        plain = build("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128, head_dim=16)
        plain.save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=form, device_map="cpu").eval()

    def test_four_bits_are_exact_and_stay_as_they_are(self, model: Any) -> None:
        found = answer(model)
        assert (found.semgrad, found.paragrad) == pytest.approx(plain_scores(model, CASES[0]), rel=1e-5)

    def test_what_the_library_has_repacked_is_refused(self, model: Any) -> None:
        with torch.no_grad():
            model(input_ids=torch.tensor([CASES[0].prompt]))
        layer = model.model.layers[0].mlp.up_proj
        if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            pytest.skip("this CPU has no kernel to repack for")
        with unchanged(model), pytest.raises(UnsupportedModelError, match="repacked"):
            answer(model)


def test_a_gradient_that_does_not_arrive_gives_a_reason_and_no_score() -> None:
    """Two layers with windows of six tokens see ten tokens back."""
    model, response = shared("mistral-sliding"), CASES[2].response
    near, far = (gradient_scores(model, CASES[2].prompt, response, semantic_token=t) for t in (-3, -19))
    assert near.reason is None
    assert (far.semgrad, far.paragrad, far.hybridgrad, far.grid) == (None, None, None, ())
    assert "out of the reach" in str(far.reason)
    assert far.log_probs == pytest.approx(near.log_probs)


def test_a_quantized_head_is_refused() -> None:
    case, model = CASES[0], quantized(another_tensor, head=True)
    with pytest.raises(UnsupportedModelError, match="unquantized lm_head"):
        gradient_scores(model, case.prompt, case.response, semantic_token=-3)
