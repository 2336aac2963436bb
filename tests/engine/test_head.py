"""The blocked head against brute force, closed forms and its own invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.scores import head as head_module
from semgrad_guard.engine.scores.head import Distribution, HeadScores, Logits, Products, score_head

TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=2.0),
    "both": LogitTransform(scale=1.7, softcap=3.0),
}
OBJECTIVES = st.builds(
    Objective,
    st.sampled_from(["paper", "official"]),
    norm=st.sampled_from(["l1", "l2"]),
    weighted=st.booleans(),
)


def make(
    n: int, vocabulary: int, width: int, *, bias: bool = False, seed: int = 0, sharpness: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(width, vocabulary, bias=bias, dtype=torch.float64).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    states = torch.randn(n, width, generator=generator, dtype=torch.float64) * sharpness
    return states, torch.randint(vocabulary, (n,), generator=generator), head


def brute_force(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Linear,
    lengths: list[int],
    transform: LogitTransform = TRANSFORMS["plain"],
    objective: Objective = Objective(),  # noqa: B008 - frozen
) -> HeadScores:
    """Autograd through the whole head, answer by answer, with the full n x V logits."""
    entropies, log_probs, seeds, paragrads = [], [], [], []
    for part, aims in zip(states.split(lengths), targets.split(lengths), strict=True):
        leaf, weight = part.clone().requires_grad_(), head.weight.clone().requires_grad_()
        log_p = transform(nn.functional.linear(leaf, weight, head.bias)).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).detach()
        chosen = log_p.gather(1, aims[:, None]).squeeze(1)
        loss = ((entropy if objective.weighted else 1) * chosen).sum() / (len(part) if objective.averages else 1)
        seed, of_weight = torch.autograd.grad(loss, [leaf, weight])
        entropies.append(entropy)
        log_probs.append(chosen.detach())
        seeds.append(seed)
        paragrads.append(of_weight.abs().mean() if objective.norm == "l1" else of_weight.square().mean().sqrt())
    return HeadScores(torch.cat(entropies), torch.cat(log_probs), torch.cat(seeds), torch.stack(paragrads))


def found(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Linear,
    lengths: list[int],
    transform: LogitTransform = TRANSFORMS["plain"],
    objective: Objective = Objective(),  # noqa: B008 - frozen
    kept_bytes: int = 0,
) -> HeadScores:
    return score_head(
        states, targets, head=head, lengths=lengths, transform=transform, objective=objective, kept_bytes=kept_bytes
    )


def assert_close(found: HeadScores, expected: HeadScores, tolerance: float) -> None:
    for name in ("entropies", "log_probs", "seed", "paragrad"):
        ours, theirs = getattr(found, name).double(), getattr(expected, name).double()
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))  # next to nothing is a difference of ones
        assert error < tolerance, f"{name}: {error:.1e}"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    bias=st.booleans(),
    sharpness=st.sampled_from([0.1, 1.0, 8.0]),
    transform=st.sampled_from(sorted(TRANSFORMS)),
    objective=OBJECTIVES,
    block=st.integers(1, 130),
    kept=st.sampled_from(["recomputed", "kept", "written"]),
    ties=st.booleans(),
)
def test_blocks_of_any_size_equal_brute_force(
    seed: int,
    lengths: list[int],
    bias: bool,
    sharpness: float,
    transform: str,
    objective: Objective,
    block: int,
    kept: str,
    ties: bool,
) -> None:
    """Answer by answer; where the greatest logit is shared by several tokens, in one block or in several, too."""
    states, targets, head = make(sum(lengths), 128, 9, bias=bias, seed=seed, sharpness=sharpness)
    if ties:
        top = int(nn.functional.linear(states[0], head.weight, head.bias).argmax())
        for twin in (11, 12, 127):
            head.weight[twin] = head.weight[top]
            if bias:
                head.bias[twin] = head.bias[top]
        targets[0] = 127
    before, known = states.clone(), TRANSFORMS[transform]
    raw = list(nn.functional.linear(states, head.weight, head.bias)) if kept == "written" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "_BLOCK", block)
        patch.setattr(head_module, "_PRODUCTS", 17)
        ours = score_head(
            states,
            targets,
            lengths=lengths,
            head=head,
            transform=known,
            objective=objective,
            raw_logits=raw,
            kept_bytes=64 << 20 if kept == "kept" else 0,
        )
    assert_close(ours, brute_force(states, targets, head, lengths, known, objective), 1e-10)
    assert torch.equal(states, before)


def test_squares_of_tiny_gradients_do_not_vanish() -> None:
    """1e-25 squared is below float32's smallest number."""
    states, targets, head = make(3, 50, 8)
    tiny, squares = (states * 1e-25).float(), Objective(norm="l2")
    ours = found(tiny, targets, head.float(), [3], objective=squares)
    expected = brute_force(tiny.double(), targets, head.double(), [3], objective=squares)
    assert math.isclose(float(ours.paragrad[0]), float(expected.paragrad[0]), rel_tol=1e-4)


@pytest.mark.parametrize("block", [7, 64])
@pytest.mark.parametrize("aims_at_mode", [True, False], ids=["expected", "surprise"])
@pytest.mark.parametrize("gap", [10.0, 16.0, 20.0, 30.0])
def test_nearly_certain_tokens_keep_their_digits(
    gap: float, aims_at_mode: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 - p is e^-gap here, far below float32's resolution near 1: the difference 1 - p would be noise or zero."""
    monkeypatch.setattr(head_module, "_BLOCK", block)
    vocabulary = 40
    head = nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(torch.eye(vocabulary))
    states = torch.linspace(-1, 1, vocabulary, dtype=torch.float64)[None].repeat(2, 1)
    states[:, 13] = 1 + gap
    targets = torch.tensor([13, 13]) if aims_at_mode else torch.tensor([5, 5])
    exact = found(states, targets, head, [2])
    p_rest = torch.exp(states[0] - states[0, 13])
    p_rest[13] = 0
    rest = p_rest.sum()
    entropy = torch.log1p(rest) - (p_rest * (states[0] - states[0, 13])).sum() / (1 + rest)
    assert math.isclose(float(exact.entropies[0]), float(entropy), rel_tol=1e-12)
    ours = found(states.float(), targets, head.float(), [2])
    for name in ("entropies", "log_probs", "paragrad"):
        assert torch.allclose(getattr(ours, name).double(), getattr(exact, name).double(), rtol=1e-4, atol=0), name
    assert float((ours.seed.double() - exact.seed).abs().max() / exact.seed.abs().max()) < 1e-4


def test_large_sums_are_not_accumulated_serially_in_float32() -> None:
    """`torch.norm(p=1)` loses half of such a sum; the blocks must not."""
    states, targets, head = make(4, 20_000, 96)
    ours = found(states.float(), targets, head.float(), [4])
    expected = brute_force(states, targets, head.double(), [4])
    assert math.isclose(float(ours.paragrad[0]), float(expected.paragrad[0]), rel_tol=1e-4)


# Logits as they were left or computed again: the same distributions, and half precision as good as float32.

VOCABULARY, WIDTH, TOKENS = 6000, 48, 12


@pytest.fixture(params=[True, False], ids=["multiplied", "converted"])
def bfloat16_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """CPUs that multiply bfloat16, and others."""
    monkeypatch.setattr(head_module, "_capabilities", lambda: {"avx512_bf16": request.param, "cpu_name": "any"})
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
        found = Logits(states, targets, head, transform=TRANSFORMS["plain"], **options)
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
    options = {
        "lengths": [length] * (TOKENS // length),
        "transform": TRANSFORMS["plain"],
        "objective": Objective("official"),
    }
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
    places = head_module.greatest(rows, count)
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
