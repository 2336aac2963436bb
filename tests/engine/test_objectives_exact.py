"""Norms, weights, tokens, grids and parts of a response against plain autograd, in every tier."""

from __future__ import annotations

import math

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel, gradient_scores
from semgrad_guard.engine.answers.answer import Evidence
from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradients import Tier, assemble
from semgrad_guard.errors import InputError
from tests.pairwise import in_turn

from .oracle import reference_scores, worst_relative_error
from .cases import CASES, Case, batch_of, score_in_tier, score_parts_in_tier
from .test_exactness import TIERS, tolerance
from .tiny_models import shared, token_ids

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")

SOME = ["llama", "gpt2", "gemma2", "mistral-sliding"]
OBJECTIVES = {
    "l2": Objective(norm="l2"),
    "unweighted": Objective(weighted=False),
    "official-l2-unweighted": Objective("official", norm="l2", weighted=False),
    "last-token": Objective(token=-1),
    "early-token": Objective(token=-6, layers=(0, 2)),
    "whole-grid": Objective(layers=(0, 1, 2, 3), last_tokens=6),
    "short-grid": Objective(last_tokens=2),
    "grid-beyond-the-prompt": Objective(last_tokens=9),
}


@in_turn(name=SOME, form=OBJECTIVES)
def test_every_form_equals_the_oracle_on_a_padded_batch(name: str, form: str) -> None:
    model, objective = shared(name), OBJECTIVES[form]
    expected = [case.reference(model, objective) for case in CASES]
    for tier in TIERS:
        found = score_in_tier(tier, model, CASES, objective)
        assert max(map(worst_relative_error, found, expected)) < tolerance(name), tier


@pytest.mark.parametrize("name", ["mamba", "llama4-chunked"])
def test_models_that_cannot_be_cut_have_grids_too(name: str) -> None:
    model, objective = shared(name), Objective(last_tokens=4, norm="l2", weighted=False)
    options = {"first_recorded": 1} if name == "mamba" else {}
    found = score_in_tier("full", model, CASES, objective)
    expected = [case.reference(model, objective, **options) for case in CASES]
    assert max(map(worst_relative_error, found, expected)) < 1e-7


def test_rows_of_the_grid_are_semgrad_of_other_layers_and_tokens() -> None:
    model, case = shared("llama"), CASES[0]
    (whole,) = score_in_tier("prefix", model, [case], Objective(layers=(0, 1, 2, 3, 4), last_tokens=5))
    for token in (-1, -3, -5):
        (found,) = score_in_tier("prefix", model, [case], Objective(layers=(1, 4), token=token))
        assert found.semgrad == pytest.approx((whole.grid[1][token] + whole.grid[4][token]) / 2, rel=1e-12)
    (default,) = score_in_tier("prefix", model, [case], Objective())
    assert [len(row) for row in default.grid] == [3, 3]
    assert default.semgrad == pytest.approx(math.fsum(row[0] for row in default.grid) / 2, rel=1e-12)


@in_turn(name=SOME, tier=TIERS)
def test_parts_of_a_response_equal_each_parts_own_objective(name: str, tier: Tier) -> None:
    model = shared(name)
    cases = [Case(token_ids(9, 1), token_ids(7, 2), -3), Case(token_ids(5, 3), token_ids(4, 4), -2)]
    segments = [(3, 1, 3), (4,)]
    for objective in (Objective(), Objective("official", norm="l2", last_tokens=4)):
        found = score_parts_in_tier(tier, model, batch_of(cases, objective, segments), objective)
        assert [len(row) for row in found] == [3, 1]
        for case, lengths, row in zip(cases, segments, found, strict=True):
            for number, scores in enumerate(row):
                begin = sum(lengths[:number])
                part = slice(begin, begin + lengths[number])
                expected = case.reference(model, objective, part=part)
                assert worst_relative_error(scores, expected) < tolerance(name)


def test_one_part_is_the_whole() -> None:
    model = shared("llama")
    whole = score_in_tier("prefix", model, CASES[:1], Objective())
    ((part,),) = score_parts_in_tier("prefix", model, batch_of(CASES[:1], segments=[(4,)]), Objective())
    assert part == whole[0]


def one_turn(language_model: LanguageModel) -> InterruptibleLock:
    """The softmax is patched here, so that the model counts as changed in each turn, and its kept states with it."""
    return language_model._scorer.lock


@pytest.mark.parametrize(
    "objective",
    [Objective(layers=(0, 1, 2, 3), last_tokens=30), Objective(token=-14), Objective(token=-1)],
    ids=["grid", "earlier", "later"],
)
def test_a_generation_keeps_what_will_be_asked_for(language_model: LanguageModel, objective: Objective) -> None:
    """The capture begins before t*, or behind it, and at the embeddings, as the objective states; padding included."""
    options = GenerationOptions(max_tokens=4)
    with one_turn(language_model):
        answers = language_model.generate_batch(["q", "a longer question"], options, objective=objective)
        scored = [answer.evidence.gradients(objective) for answer in answers]
    for answer, timed in zip(answers, scored, strict=True):
        assert timed is not None
        assert timed.scores.tier == "captured"
        prompt = answer.prompt
        expected = reference_scores(
            language_model._model,
            prompt.ids,
            answer.response_ids,
            prompt.semantic_token.offset if objective.token is None else objective.token,
            layers=objective.layers,
            grid_tokens=objective.last_tokens and min(objective.last_tokens, len(prompt.ids)),
        )
        assert worst_relative_error(timed.scores, expected) < 1e-9


def test_a_trace_that_begins_earlier_serves_too(language_model: LanguageModel) -> None:
    options = GenerationOptions(max_tokens=4)
    with one_turn(language_model):
        answers = language_model.generate_batch(["q", "longer"], options, objective=Objective(last_tokens=14))
        found = [_scores(answer.evidence, Objective()) for answer in answers]
    assert {scores.tier for scores in found} == {"captured"}
    for answer, scores in zip(answers, found, strict=True):
        prompt, t = answer.prompt, answer.prompt.semantic_token.offset
        expected = reference_scores(language_model._model, prompt.ids, answer.response_ids, t)
        assert worst_relative_error(scores, expected) < 1e-9


def _scores(evidence: Evidence, objective: Objective):
    timed = evidence.gradients(objective)
    assert timed is not None
    return timed.scores


def test_the_front_door_takes_norm_weights_and_grid() -> None:
    model, case = shared("llama"), CASES[0]
    found = gradient_scores(
        model, case.prompt, case.response, semantic_token=-3, norm="l2", weighted=False, last_tokens=5
    )
    expected = case.reference(model, Objective(norm="l2", weighted=False, last_tokens=5))
    assert worst_relative_error(found, expected) < 1e-9


def test_a_token_outside_the_prompt_is_named_before_anything_runs(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match=r"token=-99 .* prompt of \d+ tokens"):
        language_model.generate("q", objective=Objective(token=-99))
    with pytest.raises(InputError, match="token=-99"):
        language_model.score("q", "a", objective=Objective(token=-99))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"norm": "l3"}, "'l3'"),
        ({"token": 0}, "-1 being its last"),
        ({"last_tokens": 0}, "at least 1"),
    ],
)
def test_bad_objectives(bad: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Objective(**bad)  # type: ignore[arg-type]


def test_a_grid_that_is_not_finite_is_left_out_and_the_scores_stay() -> None:
    one = torch.ones(1, dtype=torch.float64)
    grids = [((1.0, math.inf),), ((1.0, 2.0),)]
    found = assemble(
        [1, 1], "prefix", semgrad=[1.0, 1.0], grids=grids, paragrad=[1.0, 1.0], entropies=one.repeat(2),
        log_probs=-one.repeat(2),
    )  # fmt: skip
    assert [scores.grid for scores in found] == [(), ((1.0, 2.0),)]
    assert all(scores.semgrad == 1.0 and scores.reason is None for scores in found)
