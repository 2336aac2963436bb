"""Sampled ParaGrad against the exact value: without bias, with an honest error, and nothing else changed."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semgrad_guard import gradient_scores
from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.scoring import head as head_module
from semgrad_guard.engine.scores.head import HeadScores, score_head
from semgrad_guard.engine.scoring.stratified_rows import StratifiedRows
from semgrad_guard.errors import InputError

from .scoring_paths import CASES, batch_of, score_in_tier, score_parts_in_tier
from .test_head import TRANSFORMS, make
from .tiny_models import shared

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")

LENGTHS = [3, 1, 2]
SEEDS = range(250)


def score(*, seed: int = 0, rows: int | None = 120, name: str = "plain", sharpness: float = 1.0) -> HeadScores:
    """Three answers over 300 vocabulary entries, the second of one token."""
    states, targets, head = make(6, 300, 9, sharpness=sharpness)
    return score_head(
        states,
        targets,
        lengths=LENGTHS,
        head=head,
        transform=TRANSFORMS[name],
        averages=False,
        sampled_rows=rows,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("name", "sharpness"), [*((name, 1.0) for name in TRANSFORMS), ("plain", 0.05), ("plain", 6.0)], ids=str
)
def test_estimates_have_no_bias_and_the_error_they_report(name: str, sharpness: float) -> None:
    exact = score(rows=None, name=name, sharpness=sharpness).paragrad.tolist()
    found = [score(seed=seed, name=name, sharpness=sharpness) for seed in SEEDS]
    for answer in (0, 2):
        values = torch.stack([scores.paragrad[answer] for scores in found])
        errors = torch.tensor([scores.paragrad_errors[answer] for scores in found], dtype=torch.float64)
        bias, spread = float(values.mean()) - exact[answer], float(values.std())
        assert spread < 0.1 * exact[answer], "too noisy for a bias to be seen"
        assert abs(bias) < 3.5 * spread / math.sqrt(len(SEEDS))
        # The variance is estimated without bias too; a chi-square of 250 leaves a tenth of play, ratios a bit more.
        assert float(errors.square().mean()) / spread**2 == pytest.approx(1, abs=0.35)
        covered = ((values - exact[answer]).abs() < 2 * errors).double().mean()
        assert covered > 0.8 or spread < 1e-6 * exact[answer], "rows too light to be met often make skewed estimates"
    assert {(float(scores.paragrad[1]), scores.paragrad_errors[1]) for scores in found} == {(exact[1], None)}


def naive(a: torch.Tensor, states: torch.Tensor, limit: float, draws: int, seed: int) -> tuple[float, float]:
    """The same draws, looked up one by one on the line of all rows."""
    magnitudes = states.abs().sum(dim=1)
    bounds = [float((column.abs() * magnitudes).sum()) for column in a.t()]
    norms = [float((column @ states).abs().sum()) for column in a.t()]
    per_cell = min(draws, 8)
    cells = -(-draws // per_cell)
    width = limit / cells
    uniform = torch.rand(cells + 1, per_cell, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def share(x: float) -> float:
        for bound, norm in zip(bounds, norms, strict=True):
            if x < bound:
                return norm / bound
            x -= bound
        return 0.0

    shares = [[share((i + float(u)) * width) for u in cell] for i, cell in enumerate(uniform)]
    variance = sum(statistics.variance(cell) / per_cell for cell in shares)
    return width * sum(map(statistics.fmean, shares)), width * math.sqrt(variance)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block=st.integers(1, 40),
    at_once=st.integers(1, 9),
    draws=st.integers(2, 40),
    slack=st.sampled_from([1.0, 1.3]),
    zeros=st.booleans(),
)
def test_blocks_find_what_looking_up_every_point_finds(
    seed: int, block: int, at_once: int, draws: int, slack: float, zeros: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, 37, generator=generator, dtype=torch.float64)
    if zeros:
        a[:, ::3] = 0
    states = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    limits = a.abs().sum(dim=1) * slack
    sample = StratifiedRows(states, limits, draws=draws, seed=seed)
    for piece in a.split(block, dim=1):
        sample.add(piece, at_once=at_once)
    limit = float((limits * states.abs().sum(dim=1)).sum())
    assert (sample.total, sample.error) == pytest.approx(naive(a, states, limit, draws, seed), rel=1e-9, abs=1e-12)


def test_many_draws_approach_the_sum() -> None:
    """Cells become narrower than rows: the error falls faster than by the root of their number."""
    generator = torch.Generator().manual_seed(1)
    a, states = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (50, 6))
    sample = StratifiedRows(states, a.abs().sum(dim=1), draws=100_000, seed=0)
    sample.add(a, at_once=1000)
    exact = float((a.t() @ states).abs().sum())
    assert sample.total == pytest.approx(exact, rel=1e-4)
    assert 0 < sample.error < 1e-4 * exact


@pytest.mark.parametrize("rows", [300, 301, 10**9])
def test_no_fewer_rows_than_there_are_is_exact(rows: int) -> None:
    found, exact = score(rows=rows), score(rows=None)
    assert torch.equal(found.paragrad, exact.paragrad)
    assert found.paragrad_errors == (None, None, None)
    assert score(rows=299).paragrad_errors[0] is not None


def test_nothing_but_paragrad_is_sampled() -> None:
    found, exact = score(), score(rows=None)
    for name in ("entropies", "log_probs", "seed"):
        assert torch.equal(getattr(found, name), getattr(exact, name))


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(4)), block=st.integers(1, 50), elements=st.sampled_from([17, 1 << 18]))
def test_an_estimate_depends_on_neither_its_batch_nor_the_blocks(order: list[int], block: int, elements: int) -> None:
    lengths = [2, 3, 4, 2]
    states, targets, head = make(11, 90, 6)
    options: dict[str, Any] = {"head": head, "transform": LogitTransform(), "averages": True, "sampled_rows": 30}
    together = score_head(states, targets, lengths=lengths, **options)
    parts = list(zip(states.split(lengths), targets.split(lengths), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "_BLOCK", block)
        patch.setattr(head_module, "_PRODUCTS", elements)
        permuted = score_head(
            torch.cat([parts[i][0] for i in order]),
            torch.cat([parts[i][1] for i in order]),
            lengths=[lengths[i] for i in order],
            **options,
        )
    assert torch.allclose(permuted.paragrad, together.paragrad[list(order)], rtol=1e-11)
    assert permuted.paragrad_errors == pytest.approx([together.paragrad_errors[i] for i in order], rel=1e-9)


def test_draws_are_repeatable_and_leave_the_generators_alone() -> None:
    states, targets, head = make(3, 90, 6)
    options: dict[str, Any] = {"lengths": [3], "head": head, "transform": LogitTransform(), "averages": False}
    before = torch.get_rng_state()
    first, again, other = (score_head(states, targets, **options, sampled_rows=30, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.paragrad, again.paragrad)
    assert first.paragrad_errors == again.paragrad_errors
    assert first.paragrad[0] != other.paragrad[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps", [False, True], ids=["", "kept-logits"])
def test_low_precision_samples_as_honestly(dtype: torch.dtype, keeps: bool) -> None:
    """No bias against the exact value of the same dtype, and errors of the right size."""
    states, targets, head = make(5, 400, 16)
    states = states.to(dtype)
    half = nn.Linear(16, 400, bias=False, dtype=dtype).requires_grad_(False)
    half.weight.copy_(head.weight)
    options: dict[str, Any] = {"lengths": [5], "head": half, "transform": LogitTransform(), "averages": False}
    options["raw_logits"] = list(nn.functional.linear(states, half.weight)) if keeps else None
    exact = float(score_head(states, targets, **options).paragrad[0])
    ratios = []
    for seed in range(40):
        found = score_head(states, targets, **options, sampled_rows=80, seed=seed)
        (error,) = found.paragrad_errors
        assert error is not None
        assert 0 < error < 0.1 * exact
        ratios.append(float(found.paragrad[0]) / exact)
        assert abs(ratios[-1] - 1) < 4 * error / exact + 1 / 80
    assert abs(statistics.fmean(ratios) - 1) < 3.5 * statistics.stdev(ratios) / math.sqrt(len(ratios))


@pytest.mark.parametrize("gap", [16.0, 30.0, 200.0])
def test_nearly_certain_answers(gap: float) -> None:
    """Half of the line is one row; at a gap of 200 float32 knows no other token, and there is nothing to sample."""
    head = nn.Linear(40, 40, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(40))
    states = torch.linspace(-1, 1, 40)[None].repeat(2, 1)
    states[:, 13] = 1 + gap
    options: dict[str, Any] = {"lengths": [2], "head": head, "transform": LogitTransform(), "averages": False}
    targets = torch.tensor([13, 13])
    exact = score_head(states, targets, **options)
    found = score_head(states, targets, **options, sampled_rows=20)
    assert float(found.paragrad[0]) == pytest.approx(float(exact.paragrad[0]), rel=1e-4)
    assert found.paragrad_errors[0] == pytest.approx(0, abs=1e-4 * float(exact.paragrad[0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_finite_stays_so(bad: float, weighted: bool) -> None:
    states, targets, head = make(3, 60, 5)
    states[1, 2] = bad
    found = score_head(
        states, targets, lengths=[3], head=head, transform=LogitTransform(), averages=False, weighted=weighted,
        sampled_rows=20,
    )  # fmt: skip
    assert not math.isfinite(float(found.paragrad[0]))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_replay_samples_and_autograd_does_not(name: str) -> None:
    model, objective = shared(name), Objective(sampled_rows=80)
    exact = score_in_tier("prefix", model, CASES, Objective())
    for tier in ("captured", "prefix"):
        for found, expected, case in zip(score_in_tier(tier, model, CASES, objective), exact, CASES, strict=True):
            assert found.semgrad == pytest.approx(expected.semgrad, rel=1e-6)
            if len(case.response) == 1:
                assert found.paragrad_error is None
                assert found.paragrad == pytest.approx(expected.paragrad, rel=1e-6)
                continue
            assert found.paragrad_error is not None
            assert found.paragrad != expected.paragrad
            assert abs((found.paragrad or 0) - (expected.paragrad or 0)) < 4 * found.paragrad_error
    full = score_in_tier("full", model, CASES, objective)
    assert [scores.paragrad_error for scores in full] == [None] * 3
    assert full[0].paragrad == pytest.approx(exact[0].paragrad, rel=1e-6)


def test_every_part_has_an_error_of_its_own() -> None:
    model, objective = shared("llama"), Objective(sampled_rows=80)
    ((*parts,),) = score_parts_in_tier("prefix", model, batch_of(CASES[2:], objective, [(2, 1, 3)]), objective)
    assert [part.paragrad_error is None for part in parts] == [False, True, False]
    ((*exact,),) = score_parts_in_tier("prefix", model, batch_of(CASES[2:], None, [(2, 1, 3)]), Objective())
    for found, expected in zip(parts, exact, strict=True):
        assert (
            abs((found.paragrad or 0) - (expected.paragrad or 0))
            <= 4 * (found.paragrad_error or 0) + (expected.paragrad or 0) / 80
        )


def test_the_front_door_samples() -> None:
    model, case = shared("llama"), CASES[0]
    found = gradient_scores(model, case.prompt, case.response, semantic_token=-3, sampled_rows=80)
    assert found.paragrad_error is not None
    assert gradient_scores(model, case.prompt, case.response, semantic_token=-3).paragrad_error is None


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2"):
        Objective(sampled_rows=1)
    with pytest.raises(InputError, match="norm='l2', which is exact"):
        Objective(norm="l2", sampled_rows=100)
