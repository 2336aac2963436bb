"""Attention of a replay's few queries over a cache: the library's numbers, in a replay and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay import kernels
from semgrad_guard.engine.replay.kernels import attend
from semgrad_guard.engine.scores.scorer import Scorer

from .oracle import worst_relative_error
from .scoring_paths import CASES, score_in_tier
from .tiny_models import build, shared

Shape = tuple[int, int, int, int, int]
SHAPES: dict[str, Shape] = {  # batch, query heads, key heads, queries, keys
    "shared keys": (2, 6, 2, 5, 17),
    "a head each": (1, 3, 3, 4, 9),
    "one key head": (3, 4, 1, 1, 6),
    "no cache": (2, 4, 2, 7, 7),
}
WIDTH, VALUES = 8, 6


class Heads(nn.Module):
    """What the interface reads from the module that calls it."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


class Inputs:
    """Random queries, a cache, and what is new of keys and values."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        batch, heads, groups, n, total = shape

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        self.module = Heads(heads // groups)
        self.query = normal(batch, n, heads, WIDTH).requires_grad_()
        self.keys, self.new_keys = normal(batch, groups, total - n, WIDTH), normal(batch, groups, n, WIDTH)
        self.values, self.new_values = normal(batch, groups, total - n, VALUES), normal(batch, groups, n, VALUES)
        self.new_keys.requires_grad_()
        self.new_values.requires_grad_()
        self.arriving = normal(batch, n, heads, VALUES)

    def through(self, attends: Any, mask: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
        """What it answers, and the gradients by queries, new keys and new values."""
        keys = torch.cat([self.keys, self.new_keys], dim=2)
        values = torch.cat([self.values, self.new_values], dim=2)
        output, _ = attends(self.module, self.query.transpose(1, 2), keys, values, mask, **options)
        leaves = [self.query, self.new_keys, self.new_values]
        return [output.detach(), *torch.autograd.grad(output, leaves, self.arriving)]


def causal(shape: Shape) -> torch.Tensor:
    batch, _, _, n, total = shape
    return torch.ones(n, total, dtype=torch.bool).tril(total - n).expand(batch, 1, n, total)


def padded(shape: Shape) -> torch.Tensor:
    """Every second row has two columns of padding on its left; every query sees itself."""
    mask = causal(shape).clone()
    mask[::2, :, :, :2] = False
    n, total = shape[3:]
    return mask | torch.eye(total, dtype=torch.bool)[total - n :]


def additive(shape: Shape) -> torch.Tensor:
    return torch.zeros(padded(shape).shape, dtype=torch.float64).masked_fill_(~padded(shape), -1e30)


def by_head(shape: Shape) -> torch.Tensor:
    """As position biases come."""
    slopes = torch.arange(1.0, shape[1] + 1, dtype=torch.float64)[None, :, None, None]
    return additive(shape) - slopes * torch.arange(shape[4], dtype=torch.float64).flip(0) / 10


MASKS = {"causal": causal, "padded": padded, "additive": additive, "by head": by_head}


@pytest.mark.parametrize("weights", [1, 100, 1 << 18], ids=lambda count: f"{count} weights at once")
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_the_librarys(
    shape: str, mask: str, scaling: float | None, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_WEIGHTS", weights)
    inputs, seen = Inputs(SHAPES[shape]), MASKS[mask](SHAPES[shape])
    found = inputs.through(attend, seen, scaling=scaling)
    expected = inputs.through(sdpa_attention_forward, seen, scaling=scaling)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Products and softmax are taken in float32: closer to the exact result than the library's."""
    shape = SHAPES["shared keys"]
    ours, theirs = (Inputs(shape, dtype).through(f, causal(shape)) for f in (attend, sdpa_attention_forward))
    exact = Inputs(shape, dtype)
    for name in ("query", "new_keys", "new_values"):
        setattr(exact, name, getattr(exact, name).detach().double().requires_grad_())
    for name in ("keys", "values", "arriving"):
        setattr(exact, name, getattr(exact, name).double())
    for a, b, expected in zip(ours, theirs, exact.through(sdpa_attention_forward, causal(shape)), strict=True):
        assert a.dtype == dtype
        error, reached = (float((x.double() - expected).norm() / expected.norm()) for x in (a, b))
        assert error < torch.finfo(dtype).eps
        assert error < 1.1 * reached


def test_a_query_that_may_see_nothing_stays_a_number() -> None:
    """Padding is masked out entirely; its answer plays no part, unless it is NaN."""
    shape = SHAPES["shared keys"]
    mask = causal(shape).clone()
    mask[0, :, 1] = False
    assert all(bool(torch.isfinite(x).all()) for x in Inputs(shape).through(attend, mask))


@pytest.mark.parametrize("case", ["no mask", "position_bias", "no graph"])
def test_what_is_not_a_replays_is_left_to_the_library(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._FewQueries, "apply", lambda *_: pytest.fail("taken"))
    shape = SHAPES["no cache"]
    inputs, mask, options = Inputs(shape), causal(shape), dict[str, Any]()
    if case == "no mask":
        mask = None
    elif case == "position_bias":
        options["position_bias"] = by_head(shape)[:1]
    query = inputs.query.transpose(1, 2)
    with torch.set_grad_enabled(case != "no graph"):
        call = (inputs.module, query if case != "no graph" else query.detach(), inputs.new_keys, inputs.new_values)
        found, _ = attend(*call, mask, **options)
        assert torch.equal(found, sdpa_attention_forward(*call, mask, **options)[0])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys of every attention that goes the replay's way."""
    seen: list[int] = []
    apply = kernels._FewQueries.apply

    def counted(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
        seen.append(key.shape[2])
        return apply(query, key, *rest)

    monkeypatch.setattr(kernels._FewQueries, "apply", counted)
    return seen


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "mixtral", "phi3", "opt", "gpt2", "gpt-neox"])
def test_replays_take_it_and_leave_the_model_as_it_was(name: str, taken: list[int]) -> None:
    model: Any = shared(name)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for tier in ("captured", "prefix"):
        before = len(taken)
        found = score_in_tier(tier, model, CASES, Objective())
        assert len(taken) > before
        expected = [case.reference(model, Objective()) for case in CASES]
        assert max(map(worst_relative_error, found, expected)) < 1e-7
    assert all(config is model.config for config in configs)
    assert model.config._attn_implementation == "sdpa"


def test_outside_the_block_a_copys_layers_have_the_models_configuration() -> None:
    model: Any = shared("llama")
    replayer = Scorer(model).current_replayer()
    modules = [module for layer in replayer.layers for module in layer.modules() if hasattr(module, "config")]
    own: Any = replayer._copy.config
    with replayer._attentions.replaying():
        inside = [module.config for module in modules]
    assert inside
    assert not {id(own), id(model.config)} & set(map(id, inside))
    assert all(module.config is own for module in modules)
    assert own.to_dict() == model.config.to_dict()


def test_generations_and_other_kinds_of_attention_do_not(taken: list[int]) -> None:
    ids = torch.arange(1, 12)[None]
    Scorer(shared("llama")).current_replayer().generate(
        ids, torch.ones_like(ids), None, max_new_tokens=4, do_sample=False
    )
    score_in_tier("captured", build("llama", attention="eager"), CASES[:1], Objective())
    assert not taken
