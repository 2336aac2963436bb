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
from semgrad_guard.engine.scores.head import HeadScores, score_head

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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 5e-4), (torch.bfloat16, 2e-2)], ids=str
)
def test_low_precision_stays_near_double(dtype: torch.dtype, tolerance: float) -> None:
    states, targets, head = make(5, 300, 16)
    states, half = states.to(dtype), head.to(dtype)
    ours = found(states, targets, half, [5])
    assert_close(ours, brute_force(states.double(), targets, half.double(), [5]), tolerance)


def test_uniform_logits_have_the_entropy_and_the_gradient_of_a_fair_die() -> None:
    states, targets, head = make(3, 64, 8)
    head.weight.zero_()
    ours = found(states, targets, head, [3])
    assert torch.allclose(ours.entropies, torch.full((3,), math.log(64), dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(ours.log_probs, -ours.entropies, rtol=1e-14)
    assert ours.seed.abs().max() == 0  # a head of zeros sends nothing back
    assert ours.paragrad[0] > 0


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
