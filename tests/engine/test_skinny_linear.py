"""The faster order of linear layers: the same numbers, in the replay and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import kernels
from semgrad_guard.engine.replay.kernels import Projections
from semgrad_guard.engine.scores.scorer import Scorer

from .oracle import worst_relative_error
from .scoring_paths import CASES, score_in_tier
from .tiny_models import build, shared

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")
# One rounding of the result may fall the other way, nothing more.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The faster order for small weights and any number of rows too; a list of the rows that took it."""
    taken: list[int] = []
    apply: Callable[..., torch.Tensor] = kernels._Product.apply
    monkeypatch.setattr(kernels, "_LARGE", 1)
    monkeypatch.setattr(kernels, "_FEW", range(1, 1000))
    intel = {**kernels._capabilities(), "cpu_name": "Intel"}
    monkeypatch.setattr(kernels, "_capabilities", lambda: intel)
    monkeypatch.setattr(kernels._Product, "apply", lambda x, weight: taken.append(len(x)) or apply(x, weight))
    return taken


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [5, 10, 33, 70])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_and_gradients_are_those_of_the_library(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(300, 1100, bias=bias).to(dtype).requires_grad_(False)
    quick = Projections([linear])
    x = torch.randn(2, rows, 300).to(dtype)[:, : (rows + 1) // 2].requires_grad_()
    with quick.replaying():
        found = linear(x)
    exact = F.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    tolerance = TOLERANCE[dtype]
    assert torch.allclose(found.double(), exact, rtol=tolerance, atol=tolerance * float(exact.detach().abs().max()))
    weights = torch.randn_like(found)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    expected = weights.double() @ linear.weight.double()
    assert torch.allclose(gradient.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert found.dtype == gradient.dtype == dtype
    assert found.is_contiguous()


def test_outside_the_block_nothing_changes(everywhere: list[int]) -> None:
    linear = nn.Linear(30, 50).requires_grad_(False)
    quick = Projections([linear])
    x = torch.randn(10, 30)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
    with quick.replaying():
        linear(x)
    linear(x)
    assert everywhere == [10]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "phi3", "opt"])
def test_replays_in_the_faster_order_are_exact(name: str, everywhere: list[int]) -> None:
    model, objective = build(name), Objective()  # whose linear maps nobody has looked at yet
    expected = [case.reference(model, objective) for case in CASES]
    for tier in ("captured", "prefix"):
        before = len(everywhere)
        found = score_in_tier(tier, model, CASES, objective)
        assert len(everywhere) > before
        assert max(map(worst_relative_error, found, expected)) < 1e-7, tier


def test_answers_are_generated_in_the_order_of_the_users_model(everywhere: list[int]) -> None:
    scorer = Scorer(shared("llama"))
    ids = torch.arange(1, 12)[None]
    scorer.current_replayer().generate(ids, torch.ones_like(ids), None, max_new_tokens=4, do_sample=False)
    assert not everywhere
