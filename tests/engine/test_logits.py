"""Logits as they were left or computed again: the same distributions, and half precision as good as float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.replay import kernels
from semgrad_guard.engine.scores import head as head_module
from semgrad_guard.engine.scores.head import Distribution, Logits, Products, score_head

VOCABULARY, WIDTH, TOKENS = 6000, 48, 12
PLAIN = LogitTransform()


@pytest.fixture(params=[True, False], ids=["multiplied", "converted"])
def bfloat16_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """CPUs that multiply bfloat16, and others."""
    monkeypatch.setattr(kernels, "_capabilities", lambda: {"avx512_bf16": request.param, "cpu_name": "any"})
    return request.param


def peaked(dtype: torch.dtype, *, bias: bool = False) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    """States whose greatest logits are 20 to 26, where a bfloat16 is rounded to an eighth."""
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    head = head.to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    directions = head.weight[targets].float() + 0.15 * torch.randn(TOKENS, WIDTH, generator=generator)
    lengths = torch.linspace(20, 26, TOKENS)[:, None]
    states = directions * lengths / (directions * head.weight[targets].float()).sum(1, keepdim=True)
    return states.to(dtype), targets.where(torch.arange(TOKENS) % 3 > 0, 17), head


def exact(states: torch.Tensor, targets: torch.Tensor, head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropies and log-probabilities in float64 from the same numbers."""
    bias = None if head.bias is None else head.bias.double()
    log_p = nn.functional.linear(states.double(), head.weight.double(), bias).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1), log_p.gather(1, targets[:, None]).squeeze(1)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected) / expected).abs().max())


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("block", [1000, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_logits_give_the_entropies_of_exact_ones(
    dtype: torch.dtype, block: int, bias: bool, bfloat16_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "_BLOCK", block)
    states, targets, head = peaked(dtype, bias=bias)
    entropies, log_probs = exact(states, targets, head)
    kept = nn.functional.linear(states, head.weight, head.bias)
    rounded = kept.float().log_softmax(-1)
    limit = worst(-(rounded.exp() * rounded).sum(-1), entropies) / 20
    ways = {"kept": {"raw": list(kept)}, "computed once": {"kept_bytes": 1 << 30}, "computed twice": {}}
    for name, options in ways.items():
        found = Logits(states, targets, head, transform=PLAIN, **options)
        distribution, aims = found.survey()
        assert worst(distribution.entropies, entropies) < min(1e-3, limit), name
        assert worst(distribution.log_probs(aims), log_probs) < 2e-3, name
        whole = torch.cat([found.block(some) for some in found.columns()], dim=1)
        assert whole.shape[1] == VOCABULARY
        assert torch.allclose(whole.gather(1, targets[:, None]).squeeze(1), aims)
        assert worst(Distribution.of(whole.clone(), whole.argmax(1)[:, None]).entropies, entropies) < 1e-3


@pytest.mark.parametrize("length", [1, 3, 12])
def test_paragrad_and_seed_in_bfloat16_stay_near_float64(length: int, bfloat16_units: bool) -> None:
    """Of nearly certain answers, whose few large sensitivities are each rounded to 8 bits; others average out."""
    states, targets, head = peaked(torch.bfloat16)
    options = {"lengths": [length] * (TOKENS // length), "transform": PLAIN, "objective": Objective("official")}
    kept = list(nn.functional.linear(states, head.weight))
    double = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64).requires_grad_(False)
    double.weight.copy_(head.weight)
    expected = score_head(states.double(), targets, head=double, **options)
    found = score_head(states, targets, head=head, raw_logits=kept, **options)
    assert worst(found.paragrad, expected.paragrad) < 1e-2
    assert float((found.seed.double() - expected.seed).norm() / expected.seed.norm()) < 5e-3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 700),
    count=st.integers(1, 40),
    levels=st.integers(1, 1000),
)
def test_the_greatest_are_found_in_any_vocabulary(seed: int, vocabulary: int, count: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(levels, (3, vocabulary), generator=generator).bfloat16()
    count = min(count, vocabulary)
    places = kernels.greatest(rows, count)
    assert all(len(set(row)) == count for row in places.tolist())
    assert torch.equal(rows.gather(1, places).sort(dim=1).values, rows.topk(count).values.sort(dim=1).values)


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_rows_that_rounding_would_hide_are_estimated(sharpness: float) -> None:
    """In half precision alone: together they are at most its rounding's part, and their substitute is near."""
    generator = torch.Generator().manual_seed(2)
    p = (torch.randn(TOKENS, VOCABULARY, generator=generator) * sharpness).softmax(1)
    a = -p
    a[:, 17] += 1
    states = torch.randn(TOKENS, WIDTH, generator=generator)
    lengths, means = [5, TOKENS - 5], a.abs().sum(1) / VOCABULARY
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found[dtype] = products = Products(states.to(dtype), lengths, "l1", means=means)
        for block in a.to(dtype).split(1000, dim=1):
            products.add(block)
    exact = found[torch.float64].results(1)[0]
    assert worst(found[torch.float32].results(1)[0], exact) < 1e-6
    assert worst(found[torch.bfloat16].results(1)[0], exact) < 1e-3
    multiplied, every = found[torch.bfloat16]._bounds.unbind(1)
    assert bool((every * (1 - 2**-8) <= multiplied).all())
    assert bool((multiplied < every).all()) == (sharpness > 1)
