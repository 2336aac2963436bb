"""The blocked head against brute force, closed forms and its own invariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semgrad_guard.engine.objective import LogitTransform, Norm, Objective
from semgrad_guard.engine.scores import head as head_module
from semgrad_guard.engine.scores.head import HeadScores, score_head

TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=2.0),
    "both": LogitTransform(scale=1.7, softcap=3.0),
}


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
    transform: Callable[[torch.Tensor], torch.Tensor],
    averages: bool,
    *,
    weighted: bool = True,
    norm: str = "l1",
) -> HeadScores:
    """Autograd through the whole head, answer by answer, with the full n x V logits."""
    entropies, log_probs, seeds, paragrads = [], [], [], []
    for part, aims in zip(states.split(lengths), targets.split(lengths), strict=True):
        leaf, weight = part.clone().requires_grad_(), head.weight.clone().requires_grad_()
        log_p = transform(nn.functional.linear(leaf, weight, head.bias)).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).detach()
        chosen = log_p.gather(1, aims[:, None]).squeeze(1)
        loss = ((entropy if weighted else 1) * chosen).sum() / (len(part) if averages else 1)
        seed, of_weight = torch.autograd.grad(loss, [leaf, weight])
        entropies.append(entropy)
        log_probs.append(chosen.detach())
        seeds.append(seed)
        paragrads.append(of_weight.abs().mean() if norm == "l1" else of_weight.square().mean().sqrt())
    return HeadScores(torch.cat(entropies), torch.cat(log_probs), torch.cat(seeds), torch.stack(paragrads))


def assert_close(found: HeadScores, expected: HeadScores, tolerance: float) -> None:
    for name in ("entropies", "log_probs", "seed", "paragrad"):
        ours, theirs = getattr(found, name).double(), getattr(expected, name).double()
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.fixture(params=[7, 64, 1 << 20], ids=lambda block: f"block{block}")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Vocabulary blocks that do not divide the vocabulary, one that does, and one that holds it all."""
    monkeypatch.setattr(head_module, "_BLOCK", request.param)
    return request.param


@pytest.fixture(params=[0, 64 << 20], ids=["recomputed", "kept"])
def kept_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("averages", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_blocks_equal_brute_force(transform: str, bias: bool, averages: bool, kept_bytes: int) -> None:
    states, targets, head = make(6, 128, 9, bias=bias)
    lengths = [3, 1, 2]
    found = score_head(
        states,
        targets,
        lengths=lengths,
        head=head,
        transform=TRANSFORMS[transform],
        objective=Objective("official" if averages else "paper"),
        kept_bytes=kept_bytes,
    )
    expected = brute_force(states, targets, head, lengths, TRANSFORMS[transform], averages)
    assert_close(found, expected, 1e-12)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_norms_and_weights_equal_brute_force(norm: Norm, weighted: bool) -> None:
    states, targets, head = make(6, 128, 9)
    before = states.clone()
    transform, lengths = TRANSFORMS["both"], [3, 1, 2]
    found = score_head(
        states,
        targets,
        lengths=lengths,
        head=head,
        transform=transform,
        objective=Objective(norm=norm, weighted=weighted),
    )
    expected = brute_force(states, targets, head, lengths, transform, False, weighted=weighted, norm=norm)
    assert_close(found, expected, 1e-12)
    assert torch.equal(states, before)


def test_squares_of_tiny_gradients_do_not_vanish() -> None:
    """1e-25 squared is below float32's smallest number."""
    states, targets, head = make(3, 50, 8)
    tiny = (states * 1e-25).float()
    found = score_head(
        tiny, targets, lengths=[3], head=head.float(), transform=LogitTransform(), objective=Objective(norm="l2")
    )
    expected = brute_force(tiny.double(), targets, head.double(), [3], LogitTransform(), False, norm="l2")
    assert math.isclose(float(found.paragrad[0]), float(expected.paragrad[0]), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 5e-4), (torch.bfloat16, 2e-2)], ids=str
)
def test_low_precision_stays_near_double(dtype: torch.dtype, tolerance: float) -> None:
    states, targets, head = make(5, 300, 16)
    states = states.to(dtype)
    half = nn.Linear(16, 300, bias=False, dtype=dtype).requires_grad_(False)
    half.weight.copy_(head.weight)
    double = nn.Linear(16, 300, bias=False, dtype=torch.float64).requires_grad_(False)
    double.weight.copy_(half.weight)
    found = score_head(states, targets, lengths=[5], head=half, transform=LogitTransform(), objective=Objective())
    expected = brute_force(states.double(), targets, double, [5], LogitTransform(), False)
    assert_close(found, expected, tolerance)


def test_one_token_gives_an_outer_product() -> None:
    """ParaGrad with T = 1 is ||A||_1 ||H||_1 / (V d), and ||A||_1 = 2 w (1 - p(y))."""
    states, targets, head = make(1, 50, 8)
    found = score_head(states, targets, lengths=[1], head=head, transform=LogitTransform(), objective=Objective())
    p = (states @ head.weight.t()).softmax(-1)[0]
    entropy = float(-(p * p.log()).sum())
    expected = 2 * entropy * float(1 - p[targets[0]]) * float(states.abs().sum()) / (50 * 8)
    assert math.isclose(float(found.paragrad[0]), expected, rel_tol=1e-12)


def test_uniform_logits_have_the_entropy_and_the_gradient_of_a_fair_die() -> None:
    states, targets, head = make(3, 64, 8)
    head.weight.zero_()
    found = score_head(states, targets, lengths=[3], head=head, transform=LogitTransform(), objective=Objective())
    assert torch.allclose(found.entropies, torch.full((3,), math.log(64), dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(found.log_probs, -found.entropies, rtol=1e-14)
    assert found.seed.abs().max() == 0  # a head of zeros sends nothing back
    assert found.paragrad[0] > 0


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivative_of_the_transform_is_what_autograd_says(transform: str) -> None:
    z = torch.linspace(-6, 6, 41, dtype=torch.float64, requires_grad=True)
    logits = TRANSFORMS[transform](z)
    [expected] = torch.autograd.grad(logits.sum(), z)
    found = torch.as_tensor(TRANSFORMS[transform].derivative(logits.detach()), dtype=torch.float64).expand_as(z)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("aims_at_mode", [True, False], ids=["expected", "surprise"])
@pytest.mark.parametrize("gap", [10.0, 16.0, 20.0, 30.0])
def test_nearly_certain_tokens_keep_their_digits(gap: float, aims_at_mode: bool) -> None:
    """1 - p is e^-gap here, far below float32's resolution near 1: the difference 1 - p would be noise or zero."""
    vocabulary = 40
    head = nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(torch.eye(vocabulary))
    states = torch.linspace(-1, 1, vocabulary, dtype=torch.float64)[None].repeat(2, 1)
    states[:, 13] = 1 + gap
    targets = torch.tensor([13, 13]) if aims_at_mode else torch.tensor([5, 5])
    exact = score_head(states, targets, lengths=[2], head=head, transform=LogitTransform(), objective=Objective())
    p_rest = torch.exp(states[0] - states[0, 13])
    p_rest[13] = 0
    rest = p_rest.sum()
    entropy = torch.log1p(rest) - (p_rest * (states[0] - states[0, 13])).sum() / (1 + rest)
    assert math.isclose(float(exact.entropies[0]), float(entropy), rel_tol=1e-12)
    found = score_head(
        states.float(), targets, lengths=[2], head=head.float(), transform=LogitTransform(), objective=Objective()
    )
    for name in ("entropies", "log_probs", "paragrad"):
        assert torch.allclose(getattr(found, name).double(), getattr(exact, name).double(), rtol=1e-4, atol=0), name
    assert float((found.seed.double() - exact.seed).abs().max() / exact.seed.abs().max()) < 1e-4


@pytest.mark.usefixtures("block")
def test_modes_that_tie() -> None:
    """Two or more tokens share the greatest logit, in one block or in several; the target is one of them, or none."""
    states, targets, head = make(3, 60, 5)
    states[:] = states[:1]
    top = int((states[0] @ head.weight.t()).argmax())
    for twin in (11, 12, 59):
        head.weight[twin] = head.weight[top]
    targets = torch.tensor([top, 59, 3])
    found = score_head(states, targets, lengths=[3], head=head, transform=LogitTransform(), objective=Objective())
    assert_close(found, brute_force(states, targets, head, [3], LogitTransform(), False), 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block=st.integers(1, 70),
    keep=st.booleans(),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    sharpness=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_the_size_of_a_block_changes_nothing(
    seed: int, block: int, keep: bool, lengths: list[int], sharpness: float
) -> None:
    states, targets, head = make(sum(lengths), 61, 5, seed=seed, sharpness=sharpness)

    options = {"lengths": lengths, "head": head, "transform": LogitTransform(), "objective": Objective("official")}
    whole = score_head(states, targets, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "_BLOCK", block)
        patch.setattr(head_module, "_PRODUCTS", 17)
        found = score_head(states, targets, **options, kept_bytes=64 << 20 if keep else 0)
        assert_close(found, whole, 1e-11)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(4)))
def test_answers_do_not_see_each_other(seed: int, order: list[int]) -> None:
    lengths = [2, 1, 3, 2]
    states, targets, head = make(8, 40, 6, seed=seed)
    options = {"head": head, "transform": LogitTransform(), "objective": Objective()}
    together = score_head(states, targets, lengths=lengths, **options)
    parts = list(zip(states.split(lengths), targets.split(lengths), strict=True))
    permuted = score_head(
        torch.cat([parts[i][0] for i in order]),
        torch.cat([parts[i][1] for i in order]),
        lengths=[lengths[i] for i in order],
        **options,
    )
    assert torch.allclose(permuted.paragrad, together.paragrad[list(order)], rtol=1e-12)
    entropies = together.entropies.split(lengths)
    assert torch.allclose(permuted.entropies, torch.cat([entropies[i] for i in order]), rtol=1e-12)


def test_large_sums_are_not_accumulated_serially_in_float32() -> None:
    """`torch.norm(p=1)` loses half of such a sum; the blocks must not."""
    states, targets, head = make(4, 20_000, 96)
    found = score_head(
        states.float(), targets, lengths=[4], head=head.float(), transform=LogitTransform(), objective=Objective()
    )
    expected = brute_force(states, targets, head.double(), [4], LogitTransform(), False)
    assert math.isclose(float(found.paragrad[0]), float(expected.paragrad[0]), rel_tol=1e-4)
