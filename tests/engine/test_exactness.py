"""Every tier against plain autograd through everything, in float64, on every architecture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from semgrad_guard.engine.objective import Objective, Variant
from semgrad_guard.engine.scores.gradients import Tier
from semgrad_guard.engine.scores.scorer import Scorer
from tests.pairwise import in_turn

from .oracle import worst_relative_error
from .scoring_paths import CASES, Case, batch_of, generate, score_in_tier
from .tiny_models import ARCHITECTURES, STATEFUL, shared, token_ids

Record = Callable[[str, str, float], None]

# float64 throughout; the others cast norms, rotary angles, routers or the softmax to float32, whatever they are loaded
# in. There a last digit of float32 may fall either way (seldom: 1e-15 is what is seen).
ALL_DOUBLE = {"gpt2", "opt"}
# Their own logits are float32 whatever they are loaded in; a replay that stops before the head is spared that.
ROUNDED = {"mamba", "mamba2"}
TIERS: tuple[Tier, ...] = ("captured", "prefix", "full")


pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")


def tolerance(name: str) -> float:
    return 1e-9 if name in ALL_DOUBLE else 1e-7


@in_turn(name=ARCHITECTURES, variant=["paper", "official"])
def test_all_tiers_equal_the_oracle_on_a_padded_batch(name: str, variant: Variant, record: Record) -> None:
    model, objective = shared(name), Objective(variant)
    expected = [case.reference(model, objective) for case in CASES]
    for tier in TIERS:
        found = score_in_tier(tier, model, CASES, objective)
        error = max(map(worst_relative_error, found, expected))
        record(name, tier, error)
        assert error < tolerance(name), tier


@in_turn(name=ARCHITECTURES, sampled=[False, True])
def test_states_captured_by_a_real_generation_give_the_same_scores(name: str, sampled: bool, record: Record) -> None:
    model, objective = shared(name), Objective()
    prompts, offsets = [case.prompt for case in CASES], [case.semantic_token for case in CASES]
    layer = objective.span(Scorer(model).architecture.n_layers)[0]
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if sampled else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        responses, captured = generate(model, prompts, offsets, layer, max_new_tokens=7, eos_token_id=None, **options)
    # An answer may end anywhere before the batch does, at a stop string for one.
    answers = [response[:length] for response, length in zip(responses, (7, 1, 4), strict=True)]
    cases = [Case(*row) for row in zip(prompts, answers, offsets, strict=True)]
    found = score_in_tier("captured", model, cases, objective, captured)
    error = max(worst_relative_error(f, c.reference(model, objective)) for f, c in zip(found, cases, strict=True))
    record(name, "captured", error)
    assert error < tolerance(name)


@in_turn(name=["qwen3", "gemma2", "opt", "mistral-sliding"], layers=[(0,), (1, 3), (0, 1, 2, 3)])
def test_any_span_of_layers_is_exact(name: str, layers: tuple[int, ...]) -> None:
    model, objective = shared(name), Objective(layers=layers)
    expected = [case.reference(model, objective) for case in CASES]
    for tier in TIERS:
        found = score_in_tier(tier, model, CASES, objective)
        assert max(map(worst_relative_error, found, expected)) < tolerance(name), tier


@pytest.mark.parametrize("below", [0, 1, 2])
def test_states_captured_below_the_span_serve_as_well(below: int) -> None:
    model, objective, batch = shared("llama"), Objective(), batch_of(CASES)
    captured = Scorer(model).current_replayer().record(batch, below)
    found = score_in_tier("captured", model, CASES, objective, captured)
    expected = [case.reference(model, objective) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-7


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_corners_of_the_prompt(name: str, tier: Tier) -> None:
    """t* as the very first token (no prefix at all), a prompt of one token, one-token answers in every row."""
    model, objective = shared(name), Objective("official")
    for cases in (
        [Case(token_ids(5, 8), token_ids(3, 9), -5)],
        [Case(token_ids(1, 8), token_ids(3, 9), -1)],
        [Case(token_ids(6, 8), token_ids(1, 9), -1), Case(token_ids(6, 10), token_ids(1, 11), -1)],
    ):
        found = score_in_tier(tier, model, cases, objective)
        expected = [case.reference(model, objective) for case in cases]
        assert max(map(worst_relative_error, found, expected)) < tolerance(name)


@pytest.mark.parametrize("name", STATEFUL)
def test_models_that_cannot_be_cut_are_replayed_whole_and_exactly(name: str, record: Record) -> None:
    model, objective = shared(name), Objective()
    assert Scorer(model).tiers() == ("prefix", "full")
    # The Mamba models' own record of hidden states leaves the embedding out.
    options = {"first_recorded": 1} if name in ("mamba", "mamba2") else {}
    expected = [case.reference(model, objective, **options) for case in CASES]
    for tier in ("prefix", "full"):
        found = score_in_tier(tier, model, CASES, objective)
        error = max(map(worst_relative_error, found, expected))
        record(name, tier, error)
        assert error < (1e-5 if name in ROUNDED and tier == "prefix" else 1e-7)
